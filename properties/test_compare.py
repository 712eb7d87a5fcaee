"""The verdict itself: what it accuses, and what it lets pass."""

import numpy as np
import pytest

from properties import bits
from properties.compare import judge, lean

EXACT = np.abs(bits.normals(7, 0, (2048, 32))) + 2.0**-20


def cut(values: np.ndarray) -> np.ndarray:
    """`values` as bfloat16, rounded towards zero."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """`values` as bfloat16, rounded to nearest."""
    return values.astype(bits.DTYPES["bf16"])


@pytest.mark.parametrize("sign", [1, -1])
def test_cutting_leans_and_rounding_does_not(sign: int) -> None:
    """Both stay within the bound of every element; only the mean tells them apart."""
    expected, bound = sign * EXACT, 2.0**-7 * EXACT
    for got, leans in ((cut(expected), True), (rounded(expected), False)):
        assert judge(got, expected, bound).kind is None
        mean, limit = lean(got, expected, bound)
        assert (mean < -limit) == leans


def test_rows_without_a_bound_do_not_count() -> None:
    """Few rows prove nothing, and rows that are exact or unspecified are none."""
    bound = 2.0**-7 * EXACT
    bound[4:1000], bound[1000:] = 0.0, np.inf
    mean, limit = lean(cut(EXACT), EXACT, bound)
    assert abs(mean) < 1 < limit
