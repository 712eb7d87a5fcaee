"""The verdict: an output against the oracle's value and its bound, element by element."""

import math
from dataclasses import dataclass

import numpy as np

from properties.bits import unsigned_view


@dataclass(frozen=True)
class Verdict:
    """How far an output is from what is allowed."""

    kind: str | None
    """None when right, else "nan" (a NaN or Inf where a number belongs) or "value"."""
    ratio: float
    """Largest |got - expected| / bound; inf where the bound is 0 and the output is not exact."""
    worst: tuple[int, ...]
    """Index of the worst element."""
    off: int
    """Elements outside their bound."""
    got: float
    want: float
    bound: float


def judge(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> Verdict:
    """Compare `got` with float64 `expected` within `bound`, all of one shape; a bound of inf means unspecified."""
    if got.size == 0:
        return Verdict(None, 0.0, (), 0, 0.0, 0.0, 0.0)
    value = got.astype(np.float64)
    specified = np.isfinite(bound)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(value - expected)
        ratio = np.where(error == 0, 0.0, error / bound)
    broken = specified & ~np.isfinite(value)
    ratio = np.where(broken, np.inf, np.where(specified, ratio, 0.0))
    off = int(np.count_nonzero(ratio > 1.0))
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    kind = None if not off else "nan" if broken.any() else "value"
    return Verdict(
        kind, float(ratio[worst]), worst, off, float(value[worst]), float(expected[worst]), float(bound[worst])
    )


FALSE_ALARM = 1e-12
"""Probability with which `lean` may accuse a kernel whose errors have no side."""


def lean(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> tuple[float, float]:
    """Whether errors lean to one side: their mean, in bounds and away from zero, and how large chance makes it.

    Arguments are those of `judge`, [..., columns]. Each row contributes the mean over its columns of sign(expected) *
    error / bound; a row without error bound (no key, or unspecified) contributes nothing. Given the keys, rows are
    independent, because their queries are; within the bound each lies in [-1, 1]; and rounding to nearest is as likely
    to err to either side, so each has mean 0. By Hoeffding's inequality (1963, theorem 2) the mean of n such numbers
    exceeds t in size with a probability of at most 2 exp(-n t^2 / 2), which is FALSE_ALARM at t = sqrt(2 ln(2 /
    FALSE_ALARM) / n).

    Returns:
      (mean, t); a mean of 0 without any row.
    """
    counted = np.isfinite(bound) & (bound > 0)
    outwards = np.sign(expected) * (got.astype(np.float64) - expected)
    share = np.where(counted, outwards, 0.0) / np.where(counted, bound, 1.0)
    rows = int(np.count_nonzero(counted.any(axis=-1)))
    limit = math.sqrt(2 * math.log(2 / FALSE_ALARM) / max(1, rows))
    return float(share.mean(axis=-1).sum()) / max(1, rows), limit


def first_changed_bit(got: np.ndarray, want: np.ndarray) -> tuple[int, ...] | None:
    """Index of the first element whose bits differ, or None; shapes and dtypes must be equal."""
    if got.size == 0:
        return None
    changed = unsigned_view(got) != unsigned_view(want)
    at = int(np.argmax(changed))
    index = tuple(int(i) for i in np.unravel_index(at, changed.shape))
    return index if changed[index] else None
