"""Reproducible numbers: the same bits for the same seed on every Python, NumPy and machine.

NumPy keeps the raw stream of a bit generator stable but not its distributions, and libm differs between machines; so
raw Philox words are turned into numbers here with integer arithmetic and correctly rounded operations only.
"""

import math

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i32": np.dtype(np.int32),
}

_LOW_QUARTERS = np.uint64(0x0000FFFF_0000FFFF)


def words(seed: int, stream: int, count: int) -> np.ndarray:
    """`count` uint64 words [count] of the Philox stream keyed by (seed, stream); streams are independent."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)


def uniforms(seed: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """float64 `shape` in [0, 1), each from the top 53 bits of a word."""
    return ((words(seed, stream, math.prod(shape)) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def normals(seed: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """float64 `shape`, mean 0, variance 1: the sum of a word's four 16-bit uniforms (Irwin-Hall), rounded once."""
    drawn = words(seed, stream, math.prod(shape))
    pairs = (drawn & _LOW_QUARTERS) + (drawn >> np.uint64(16) & _LOW_QUARTERS)  # two sums a word, 32 bits apart
    total = (pairs + (pairs >> np.uint64(32)) & np.uint64(2**32 - 1)).astype(np.int64)
    return ((total - 2 * (2**16 - 1)) * (math.sqrt(3.0) / 2**16)).reshape(shape)


def choices(seed: int, stream: int, shape: tuple[int, ...], below: int) -> np.ndarray:
    """int64 `shape` in [0, below)."""
    return (words(seed, stream, math.prod(shape)) % np.uint64(below)).astype(np.int64).reshape(shape)


def unsigned_view(array: np.ndarray) -> np.ndarray:
    """The bits of `array` as unsigned integers of the same shape, so that NaNs compare like any other value."""
    return array.view(f"u{array.dtype.itemsize}")
