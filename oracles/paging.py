"""Where a token lies in a paged cache, and how its bits read as numbers.

A cache is `[pages, page_size / packing, packing, width]`: a slot is one token's row, slots are numbered page by page,
and `packing` tokens of a dtype narrower than 32 bits sit beside each other in one row of lanes.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike


class Location(NamedTuple):
    """Physical place of a slot; integers, or int64 arrays of one shape."""

    page: int | np.ndarray
    row: int | np.ndarray
    lane: int | np.ndarray


def align(x: int, multiple: int) -> int:
    """`x` rounded up to a multiple of `multiple`."""
    return (x + multiple - 1) // multiple * multiple


def packing(dtype: DTypeLike) -> int:
    """Values that share 32 bits: float32 1, bfloat16 2, float8 4."""
    return 32 // (8 * np.dtype(dtype).itemsize)


def locate(slot: int | np.ndarray, page_size: int, packing: int) -> Location:
    """Page, row and lane of `slot` (0 <= slot < pages * page_size)."""
    page, offset = divmod(slot, page_size)
    return Location(page, *divmod(offset, packing))


def bits(array: ArrayLike) -> np.ndarray:
    """The bit patterns of `array` as unsigned integers of its shape and width; a view where it is contiguous."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def slot_rows(cache: ArrayLike) -> np.ndarray:
    """Bit patterns [slots, width] of a paged cache [pages, page_size / packing, packing, width], row = slot number."""
    patterns = bits(cache)
    return patterns.reshape(-1, patterns.shape[-1])


def padded_row(row: np.ndarray, width: int) -> np.ndarray:
    """`row` [..., n] continued with zeros to [..., width]."""
    wide = np.zeros((*row.shape[:-1], width), row.dtype)
    wide[..., : row.shape[-1]] = row
    return wide


def decode(patterns: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """float64 values of the bit patterns (unsigned, any shape) of `dtype`, exactly."""
    if patterns.dtype.itemsize == 1:
        return _table(np.dtype(dtype))[patterns]
    if np.dtype(dtype).name == "bfloat16":  # the upper half of a float32
        patterns = np.left_shift(patterns, 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs, which unowned memory may hold
        return patterns.view(np.float32).astype(np.float64)


@cache
def _table(dtype: np.dtype) -> np.ndarray:
    """float64 value of each of the bit patterns of an 8-bit `dtype`."""
    return np.arange(256).astype(np.uint8).view(dtype).astype(np.float64)
