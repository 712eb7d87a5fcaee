"""Write token rows into a paged cache."""

import jax
import jax.numpy as jnp

from kernels.layout import LANES


def write_rows(cache: jax.Array, rows: jax.Array, loc: jax.Array) -> jax.Array:
    """A cache with each row at its slot and every other slot bit-identical.

    Args:
      cache: [N, page_size / packing, packing, width], width in whole lanes.
      rows: [T, width] in the cache's dtype.
      loc: [T] int32 slots, page * page_size + token in page; each inside the cache is named once. A row whose slot
        is negative or past the end is dropped.

    Returns:
      The written cache.
    """
    *_, packing, width = cache.shape
    slots, chunks = cache.size // width, width // LANES
    # Rows of 128 lanes in the order in which a TPU's tiles of `packing` rows hold them: XLA takes this view of the
    # cache for free and scatters into it in place, if it may; any other order would cost a copy of the cache.
    lines = cache.reshape(-1, packing, chunks, LANES).swapaxes(1, 2).reshape(-1, LANES)
    index = ((loc // packing)[:, None] * chunks + jnp.arange(chunks, dtype=jnp.int32)) * packing
    index += (loc % packing)[:, None]
    # Negative indices wrap in jnp, so dropped rows go past the end, each to a place of its own.
    outside = lines.shape[0] + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    index = jnp.where(((loc >= 0) & (loc < slots))[:, None], index, outside)
    written = _set(lines, index.reshape(-1), rows.reshape(-1, LANES))
    return written.reshape(-1, chunks, packing, LANES).swapaxes(1, 2).reshape(cache.shape)


def _set(lines: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """`lines` with `values` at the distinct rows `index`; rows past the end are dropped."""

    def as_they_are(lines: jax.Array, values: jax.Array) -> jax.Array:
        return lines.at[index].set(values, mode="drop", unique_indices=True)

    def as_integers(lines: jax.Array, values: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * lines.dtype.itemsize}")
        written = as_they_are(*(jax.lax.bitcast_convert_type(x, bits) for x in (lines, values)))
        return jax.lax.bitcast_convert_type(written, lines.dtype)

    # XLA for CPU widens a scatter of narrow floats, which alters NaNs even in rows that aren't written; XLA for TPU
    # moves them as they are, but would copy the whole cache to see it as integers.
    return jax.lax.platform_dependent(lines, values, cpu=as_integers, default=as_they_are)
