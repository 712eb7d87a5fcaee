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
        shift = scores[:, counts > 0] if counts.any() else scores
        weights = np.exp(np.minimum(scores - shift.max(axis=1, keepdims=True), 300.0))
        residuals = np.stack([_residuals(weights, values, counts, got, count) for count in (1, -1)])
        residuals[1, counts == 0] = np.inf
        dropped, key = np.unravel_index(int(np.argmin(residuals)), residuals.shape)
        index = int(np.flatnonzero(finite)[key])
        return Change(
            token=int(self.tokens[index]),
            place=self.places[index],
            count=-1 if dropped else 1,
            residual=float(residuals[dropped, key]),
            unchanged=float(_residuals(weights, values, counts, got, 0)[0]),
        )


def _residuals(weights: np.ndarray, values: np.ndarray, counts: np.ndarray, got: np.ndarray, count: int) -> np.ndarray:
    """Root mean square [n] of `got` minus the output in which key k counts `count` times more, for each key k.

    With N and l the exact numerator and normaliser, the difference is (N - l got + e (v - got)) / (l + e), e = count
    * weight; its square is expanded, so that no array [H, n, L] arises.
    """
    total = (weights * counts).sum(axis=1, keepdims=True)
    missed = (weights * counts) @ values - total * got
    extra = count * weights
    own = np.sum(got * got, axis=1, keepdims=True)
    along = missed @ values.T - np.sum(missed * got, axis=1, keepdims=True)
    apart = np.sum(values * values, axis=1) - 2 * got @ values.T + own
    square = np.maximum(np.sum(missed * missed, axis=1, keepdims=True) + 2 * extra * along + extra**2 * apart, 0)
    if counts.sum() + count == 0:
        square = np.broadcast_to(own, weights.shape)  # no key left: the output is 0
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            square = square / (total + extra) ** 2
    return np.nan_to_num(np.sqrt(square.sum(axis=0) / got.size), nan=np.inf)
