"""Layouts that callers of sparse MLA convert between: units and token ids, flat keys and paged caches."""

import jax
import jax.numpy as jnp

from kernels.checks import require
from kernels.layout import cdiv
from kernels.sparse_mla.validation import require_count, require_float, require_int32, require_rank


def units_to_token_ids(indices: jax.Array, read_block: int) -> jax.Array:
    """Token ids of every listed unit; unit u is the tokens u * read_block up to (u + 1) * read_block.

    Args:
      indices: unit ids [B, S, K] int32; negative ones are padding.
      read_block: tokens a unit.

    Returns:
      [B, S, K * read_block] int32. A padded unit gives -1 for each of its tokens. A unit with a token beyond int32
      gives 2**31 - 1 for each, which lies past every length.

    Raises:
      ValueError: `indices` is not [B, S, K] int32, or `read_block` is below 1.
    """
    require_rank("indices", indices, 3)
    require_int32("indices", indices)
    require_count("read_block", read_block)
    largest = jnp.iinfo(jnp.int32).max
    fits = indices <= (largest - (read_block - 1)) // read_block
    first = jnp.where(fits, indices, 0)[..., None] * read_block
    tokens = jnp.where(fits[..., None], first + jnp.arange(read_block, dtype=jnp.int32), largest)
    tokens = jnp.where(indices[..., None] >= 0, tokens, -1)
    return tokens.reshape(*indices.shape[:2], -1)


def flat_to_paged_cache(kv: jax.Array, page_size: int, kv_packing: int = 2) -> tuple[jax.Array, jax.Array]:
    """Cut flat keys into pages, batch row after batch row; the last page of a row is filled up with zeros.

    Args:
      kv: [B, T, D] keys.
      page_size: tokens a page, a multiple of `kv_packing`.
      kv_packing: tokens that share a row of the cache; `kernels.layout.packing` of the dtype, 2 for bfloat16.

    Returns:
      (cache, page_table): [B * ceil(T / page_size), page_size / kv_packing, kv_packing, D] in kv's dtype, and int32
      [B, ceil(T / page_size)]. D is kept: `sparse_mla_attention` wants whole lanes, align(Dk, 128).

    Raises:
      ValueError: `kv` is not [B, T, D] of floats, or `page_size` is no multiple of `kv_packing`.
    """
    require_rank("kv", kv, 3)
    require_float("kv", kv)
    require_count("kv_packing", kv_packing)
    require_count("page_size", page_size)
    require(page_size % kv_packing == 0, "page_size", page_size, f"a multiple of the packing {kv_packing}")
    batch, tokens, width = kv.shape
    pages = cdiv(tokens, page_size)
    rows = jnp.pad(kv, ((0, 0), (0, pages * page_size - tokens), (0, 0)))
    cache = rows.reshape(batch * pages, page_size // kv_packing, kv_packing, width)
    return cache, jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
