"""Write new rows into the paged caches, in place when these are donated."""

import jax
import jax.numpy as jnp

from kernels.dense_mla.prepare import prepare_kv_inputs
from kernels.dense_mla.validation import validate_cache_update
from kernels.layout import LANES
from kernels.scatter import scatter_rows


def _row_of_each_token(
    num_tokens: int,
    page_size: int,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each of T tokens: whether an active sequence owns it, its physical page, its slot in that page."""
    num_seqs = kv_lens.shape[0]
    pages_per_seq = page_indices.shape[0] // num_seqs
    active = distribution[2]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # What stands behind the active sequences is arbitrary; as ends that no token reaches they own nothing.
    ends = jnp.where(jnp.arange(num_seqs) < active, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    seq = jnp.sum(ends[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    owned = seq < active
    seq = jnp.minimum(seq, num_seqs - 1)
    position = jnp.where(owned, kv_lens[seq] - cu_q_lens[seq + 1] + token, 0)
    column = position // page_size
    owned &= (position >= 0) & (column < pages_per_seq)
    page = page_indices[jnp.clip(seq * pages_per_seq + column, 0, page_indices.shape[0] - 1)]
    return owned, page, position % page_size


def _write_rows(cache: jax.Array, rows: jax.Array, owned: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Write rows [T, width] into cache [N, page_size / packing, packing, width]; a row that is not owned is dropped."""
    num_pages, sublanes, packing, width = cache.shape
    chunks = width // LANES
    # Rows of 128 lanes, in the order in which a TPU's tiles of `packing` rows hold them. So the TPU compiler takes the
    # view for free and scatters in place, which it does for no other shape of cache and number of tokens alike.
    in_memory = cache.reshape(-1, packing, chunks, LANES).swapaxes(1, 2).reshape(-1, LANES)
    tile = (page * sublanes + slot // packing)[:, None] * chunks + jnp.arange(chunks, dtype=jnp.int32)
    index = tile * packing + (slot % packing)[:, None]
    # jnp wraps negative indices, so dropped rows go past the end, each to a place of its own.
    outside = in_memory.shape[0] + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    owned &= (page >= 0) & (page < num_pages)
    index = jnp.where(owned[:, None], index, outside)
    written = scatter_rows(in_memory, (index.reshape(-1),), rows.reshape(-1, LANES))
    return written.reshape(-1, chunks, packing, LANES).swapaxes(1, 2).reshape(cache.shape)


def write_new_rows(
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv_c: jax.Array,
    cache_k_pe: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`update_kv_cache` without its donation, to be traced into a larger function."""
    page_size = cache_kv_c.shape[1] * cache_kv_c.shape[2]
    target = _row_of_each_token(new_kv_c.shape[0], page_size, kv_lens, page_indices, cu_q_lens, distribution)
    return (
        _write_rows(cache_kv_c, prepare_kv_inputs(new_kv_c), *target),
        _write_rows(cache_k_pe, prepare_kv_inputs(new_k_pe), *target),
    )


_write_in_place = jax.jit(write_new_rows, donate_argnames=("cache_kv_c", "cache_k_pe"))


def update_kv_cache(
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv_c: jax.Array,
    cache_k_pe: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write the new rows of every active sequence into the caches; every other bit of them stays as it was.

    Token t of sequence s is position p = kv_lens[s] - cu_q_lens[s + 1] + t. It goes to physical page
    `page_indices[s * W + p // page_size]`, slot p % page_size, which is sublane row slot // packing, lane
    slot % packing. Columns past L or R are written as zero. Tokens that no active sequence owns are dropped.

    Args:
      new_kv_c: new latent rows [T, L], in the caches' dtype.
      new_k_pe: new rope rows [T, R], in the caches' dtype.
      cache_kv_c: latent cache [N, page_size / packing, packing, align(L, 128)], donated.
      cache_k_pe: rope cache [N, page_size / packing, packing, align(R, 128)], donated.
      kv_lens: [S] int32, keys of each sequence, the new ones included.
      page_indices: [S * W] int32 physical pages; only the columns in use are read.
      cu_q_lens: [S + 1] int32; sequence s owns the tokens from cu_q_lens[s] up to cu_q_lens[s + 1].
      distribution: [3] int32 (i, j, n); n sequences are active.

    Returns:
      The caches, updated.

    Raises:
      ValueError: shapes or dtypes don't fit together.
    """
    validate_cache_update(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, kv_lens, page_indices, cu_q_lens, distribution)
    return _write_in_place(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, kv_lens, page_indices, cu_q_lens, distribution)
