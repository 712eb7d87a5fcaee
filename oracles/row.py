"""One query with every key it could have read, for naming the key that a wrong output missed or took."""

from dataclasses import dataclass

import numpy as np

from oracles.paging import Location


@dataclass(frozen=True)
class Change:
    """A key counted once too often (+1) or too seldom (-1), and how well that explains an output."""

    token: int
    place: int | Location
    count: int
    residual: float
    """Root mean square of what the change leaves unexplained, over all heads and columns."""
    unchanged: float
    """The same without the change."""


@dataclass(frozen=True)
class Row:
    """A query and its candidate keys: those of its sequence up to the end of the last page, attended or not."""

    query: np.ndarray
    """float64 [H, D]."""
    tokens: np.ndarray
    """int64 [n], numbers in the sequence."""
    places: list[int | Location]
    """[n], row of a flat source, or page, row and lane."""
    keys: np.ndarray
    """float64 [n, D]; may hold NaN and Inf."""
    values: np.ndarray
    """float64 [n, L], value scale included; may hold NaN and Inf."""
    scores: np.ndarray
    """float64 [H, n], scale, cap and mask value included; NaN and Inf where the key has them."""
    counts: np.ndarray
    """int64 [n], how often the query attends each."""

    def closest_change(self, got: np.ndarray) -> Change | None:
        """The one key, added or dropped, that brings the exact output nearest to `got` [H, L].

        None when `got` isn't finite, or there is no finite candidate.
        """
        finite = np.isfinite(self.scores).all(axis=0) & np.isfinite(self.values).all(axis=1)
        if not finite.any() or not np.isfinite(got).all():
            return None
        scores, values, counts = self.scores[:, finite], self.values[finite], self.counts[finite]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        tried = np.stack([np.ones_like(counts), np.where(counts > 0, -1, 0)])[:, :, None]
        total = (weights * counts).sum(axis=1) + tried * weights.T
        weighted = (weights * counts) @ values + (tried * weights.T)[..., None] * values[:, None, :]
        empty = (counts.sum() + tried) == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            outputs = np.where(empty[..., None], 0.0, weighted / total[..., None])
        residuals = np.sqrt(np.mean((outputs - got) ** 2, axis=(2, 3)))
        residuals = np.where((tried[..., 0] == 0) | np.isnan(residuals), np.inf, residuals)
        added_or_dropped, key = np.unravel_index(int(np.argmin(residuals)), residuals.shape)
        before = weights * counts
        normaliser = np.maximum(before.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        unchanged = np.sqrt(np.mean((before @ values / normaliser - got) ** 2))
        index = int(np.flatnonzero(finite)[key])
        best = float(residuals[added_or_dropped, key])
        return Change(
            int(self.tokens[index]), self.places[index], 1 - 2 * int(added_or_dropped), best, float(unchanged)
        )
