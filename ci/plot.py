"""A picture of one case: where the error is, which keys the worst query weighed, and where those keys lie in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracles import dense_mla, sparse_mla
from oracles.row import Row
from properties import backends, bits
from properties.case import Inputs, Record
from properties.dense_mla import judging as dense_judging
from properties.families import FAMILIES
from properties.sparse_mla import judging as sparse_judging
from properties.subjects import Subject

VISIBLE = 1e-4
"""A weight below it would not be seen."""

MOST_KEYS = 96
"""Keys shown as bars: the heaviest ones, in order of their number."""

FLAT_COLUMNS = 64
"""Slots a line where the source has no pages."""

HIDDEN, ATTENDED, WRONG = 1, 2, 3
"""Sorts of slots, above 0 for those that the worst query can't reach."""


class PlotError(Exception):
    """No picture can be drawn; the message is one line."""


@dataclass(frozen=True)
class Evidence:
    """What a picture shows."""

    ratio: np.ndarray
    """[queries, H], largest |error| / bound over the columns; NaN where nothing is specified."""
    query: int
    head: int
    row: Row
    got: np.ndarray
    """[H, L], the worst query's output."""
    layout: np.ndarray
    """int [pages, page_size], sorts of slots."""

    @property
    def true_weights(self) -> np.ndarray:
        """float64 [n], the oracle's softmax weight of each candidate key for the worst head."""
        return _weights(self.row, self.head)

    def implied_weights(self) -> np.ndarray | None:
        """float64 [n], the weights that explain the output best; None where the values don't tell the keys apart."""
        finite = np.isfinite(self.row.values).all(axis=1)
        values, got = self.row.values[finite], self.got[self.head]
        if not np.isfinite(got).all() or np.linalg.matrix_rank(values) < len(values):
            return None
        implied = np.full(len(finite), np.nan)
        implied[finite] = np.linalg.lstsq(values.T, got, rcond=None)[0]
        return implied


def evidence(record: Record, subject: Subject) -> Evidence:
    """Run the case once in this process and compare.

    Raises:
        PlotError: the call fails, or no query attends anything.
    """
    inputs = record.case.inputs()
    backend = backends.RUNNERS.get(record.backend or "interpret", backends.Interpret)()
    try:
        outputs = backend.run(subject, inputs)
    except Exception as error:
        raise PlotError(
            f"no picture: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
    expected, bound, *caches = FAMILIES[record.case.family].expect(inputs)
    if outputs[0].shape != expected.shape or not np.isfinite(bound).any():
        raise PlotError("no picture: no query has a specified output")
    ratio = _ratio(outputs[0].astype(np.float64), expected, bound)
    query, head = np.unravel_index(int(np.nanargmax(np.nan_to_num(ratio, nan=-1.0, posinf=np.inf))), ratio.shape)
    got = outputs[0].astype(np.float64).reshape(*ratio.shape, -1)[query]
    row = _row(record, inputs, int(query))
    return Evidence(ratio, int(query), int(head), row, got, _layout(inputs, row, got, outputs[1:], caches))


def _ratio(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        ratio = np.abs(got - expected) / bound
    ratio = np.where(got == expected, 0.0, ratio)
    ratio = np.where(np.isfinite(got), ratio, np.inf)
    ratio = np.where(np.isfinite(bound), ratio, -1.0).max(axis=-1)
    return np.where(ratio < 0, np.nan, ratio).reshape(-1, ratio.shape[-1])


def _row(record: Record, inputs: Inputs, query: int) -> Row:
    speed = dense_judging.SPEED_OPTIONS + sparse_judging.SPEED_OPTIONS
    options: dict[str, Any] = {name: value for name, value in inputs.options.items() if name not in speed}
    if record.case.family == "dense_mla":
        return dense_mla.row(query, **inputs.arrays, **options)
    return sparse_mla.row(*divmod(query, record.case.config.queries), **inputs.arrays, **options)


def _weights(row: Row, head: int) -> np.ndarray:
    scores = np.where(row.counts > 0, row.scores[head], -np.inf)
    if not (row.counts > 0).any():
        return np.zeros(len(scores))
    weights = row.counts * np.exp(scores - scores.max())
    return weights / weights.sum()


def _layout(inputs: Inputs, row: Row, got: np.ndarray, after: tuple, caches: list[np.ndarray]) -> np.ndarray:
    """The sort of each slot: reachable by the query, attended by it, or wrong."""
    cache = inputs.arrays["cache_kv_c"] if "cache_kv_c" in inputs.arrays else inputs.arrays["kv"]
    flat = cache.ndim == 3
    slots = cache.shape[0] * cache.shape[1] if flat else int(np.prod(cache.shape[:3]))
    columns = FLAT_COLUMNS if flat else cache.shape[1] * cache.shape[2]
    sorts = np.zeros(-(-slots // columns) * columns, int)
    numbers = [_slot(place, cache) for place in row.places]
    for slot, count in zip(numbers, row.counts, strict=True):
        sorts[slot] = ATTENDED if count else HIDDEN
    change = row.closest_change(got)
    if change and change.residual <= 0.5 * change.unchanged:
        sorts[_slot(change.place, cache)] = WRONG
    for mine, wanted in zip(after, caches, strict=False):
        if mine.ndim == 4:
            differs = (bits.unsigned_view(mine) != wanted).any(axis=-1).reshape(-1)
            sorts[: len(differs)][differs] = WRONG
    return sorts.reshape(-1, columns)


def _slot(place: Any, cache: np.ndarray) -> int:
    """A place as the number of a slot."""
    if isinstance(place, tuple):
        page, line, lane = (int(part) for part in place)
        return (page * cache.shape[1] + line) * cache.shape[2] + lane
    return int(place)


def plot(record: Record, subject: Subject, path: Path) -> None:
    """Draw the case into a PNG file.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise PlotError("--plot needs matplotlib: `pip install 'ragged-oracle[report]'`") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = evidence(record, subject)
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 11), constrained_layout=True)
    _draw_errors(axes[0], shown)
    _draw_weights(axes[1], shown)
    _draw_layout(axes[2], shown)
    figure.suptitle(f"{record.case.kernel} on {record.backend}: {record.property}\n{record.case.config}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_errors(axes: Any, shown: Evidence) -> None:
    from matplotlib.colors import LogNorm

    finite = np.where(np.isinf(shown.ratio), 1e9, shown.ratio)
    image = axes.imshow(np.maximum(finite.T, 1e-3), aspect="auto", cmap="RdYlBu_r", norm=LogNorm(1e-2, 1e2))
    axes.figure.colorbar(image, ax=axes, label="|error| / bound (above 1 is wrong)", extend="both")
    axes.plot(shown.query, shown.head, "kx", markersize=10)
    axes.locator_params(integer=True)
    axes.set(xlabel="query token", ylabel="head", title=f"worst: query {shown.query}, head {shown.head} (cross)")


def _draw_weights(axes: Any, shown: Evidence) -> None:
    true, implied = shown.true_weights, shown.implied_weights()
    heavy = true if implied is None else np.maximum(true, np.abs(np.nan_to_num(implied)))
    chosen = np.sort(np.argsort(-heavy)[: min(MOST_KEYS, max(1, np.count_nonzero(heavy > VISIBLE)))])
    place = np.arange(len(chosen))
    axes.bar(place - 0.2, true[chosen], 0.4, label="true", color="tab:blue")
    told = "values don't tell the keys apart: no implied weights"
    if implied is not None:
        axes.bar(place + 0.2, implied[chosen], 0.4, label="implied by the kernel's output", color="tab:red")
        told = "weights of its keys"
    step = max(1, len(chosen) // 16)
    axes.set_xticks(place[::step], [str(number) for number in shown.row.tokens[chosen][::step]])
    axes.set(xlabel="token in the sequence", ylabel="softmax weight", title=f"worst query, head {shown.head}: {told}")
    axes.legend()


def _draw_layout(axes: Any, shown: Evidence) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ("#eeeeee", "#b8cbe0", "#4477aa", "#dd3333")
    words = ("not this query's", "hidden from it", "attended", "wrong, or likeliest to be")
    axes.imshow(shown.layout, aspect="auto", cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="none")
    for page, slot in np.argwhere(shown.layout == WRONG)[:50]:
        axes.plot(slot, page, "kx", markersize=8)
    handles = [Patch(color=colour, label=word) for colour, word in zip(colours, words, strict=True)]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize=8)
    axes.set(xlabel="slot in the page", ylabel="physical page", title="where the worst query's keys lie")
