"""Arithmetic of TPU tiles and packed cache pages that both kernels share.

A paged cache is `[pages, page_size / packing, packing, width]`: `packing` tokens of a sub-32-bit dtype share one
32-bit sublane, and `width` is padded to whole 128-lane vectors.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128
SUBLANES = 8


def cdiv(a: int, b: int) -> int:
    """The quotient a / b rounded up."""
    return -(-a // b)


def align(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least x."""
    return cdiv(x, multiple) * multiple


def packing(dtype: DTypeLike) -> int:
    """How many values of `dtype` share one 32-bit sublane: float32 1, bfloat16 2, float8 4."""
    return 4 // jnp.dtype(dtype).itemsize
