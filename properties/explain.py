"""Words for a wrong row that both kernels share."""

import numpy as np

from oracles.row import Row


def likeliest_key(row: Row, got: np.ndarray) -> str:
    """The key that, added or dropped, brings the oracle nearest to `got` [H, L]; empty when none explains much."""
    change = row.closest_change(got.astype(np.float64))
    if change is None or change.residual > 0.5 * change.unchanged:
        return ""
    what = "counted once too often" if change.count > 0 else "missing"
    left = f"leaves {change.residual:.2g} of a root mean square error of {change.unchanged:.2g}"
    return f"\n  likeliest key  token {change.token} at {change.place} {what}: {left}"
