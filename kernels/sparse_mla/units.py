"""Layout helpers around the kernel: units as token ids, a flat KV as pages."""

import jax
import jax.numpy as jnp

from kernels.checks import require
from kernels.layout import cdiv

_LARGEST = jnp.iinfo(jnp.int32).max


def units_to_token_ids(indices: jax.Array, read_block: int) -> jax.Array:
    """The tokens of each unit, [B, S, K * read_block] int32.

    A padded (negative) unit expands to -1 only, and one whose tokens don't fit int32 to the largest int32, which lies
    past every length.

    Args:
      indices: [B, S, K] int32 unit ids; unit u is the tokens [u * read_block, (u + 1) * read_block).
      read_block: tokens a unit.

    Raises:
      ValueError: read_block < 1, or indices is no int32 array of rank 3.
    """
    require(read_block >= 1, "read_block", read_block, "at least 1")
    require(indices.ndim == 3, "indices", f"rank {indices.ndim}", "rank 3: [B, S, K]")
    require(indices.dtype == jnp.int32, "indices", indices.dtype, "int32")
    last = (_LARGEST - (read_block - 1)) // read_block
    first = jnp.where(indices <= last, indices, 0) * read_block
    ids = first[..., None] + jnp.arange(read_block, dtype=jnp.int32)
    ids = jnp.where(indices[..., None] > last, _LARGEST, ids)
    ids = jnp.where(indices[..., None] < 0, -1, ids)
    return ids.reshape(*indices.shape[:2], -1)


def flat_to_paged_cache(kv: jax.Array, page_size: int, kv_packing: int = 2) -> tuple[jax.Array, jax.Array]:
    """Lay a flat KV out in pages, each row's pages in order.

    Args:
      kv: [B, T, D]; T need not be a multiple of page_size, the last page's tail is zero.
      page_size: tokens a page, a multiple of kv_packing.
      kv_packing: tokens that share a 32-bit sublane: 32 / bits of kv's dtype.

    Returns:
      cache [B * ceil(T / page_size), page_size / kv_packing, kv_packing, D] and page_table
      [B, ceil(T / page_size)] int32.

    Raises:
      ValueError: kv is not of rank 3, kv_packing < 1, or page_size is no positive multiple of kv_packing.
    """
    require(kv.ndim == 3, "kv", f"rank {kv.ndim}", "rank 3: [B, T, D]")
    require(kv_packing >= 1, "kv_packing", kv_packing, "at least 1")
    require(page_size >= 1 and page_size % kv_packing == 0, "page_size", page_size, f"a multiple of {kv_packing}")
    batch, tokens, width = kv.shape
    pages = cdiv(tokens, page_size)
    padded = jnp.pad(kv, ((0, 0), (0, pages * page_size - tokens), (0, 0)))
    cache = padded.reshape(batch * pages, page_size // kv_packing, kv_packing, width)
    return cache, jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
