"""Write token rows into a paged cache."""

import jax
import jax.numpy as jnp


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
    packing, width = cache.shape[2:]
    # Whole packed rows, as a TPU's tiles hold them: XLA takes this view for free and scatters into it in place, if it
    # may. A view of single rows or of 128-lane lines makes it copy the cache, at some widths or numbers of tokens.
    packed = cache.reshape(-1, packing, width)
    inside = (loc >= 0) & (loc < packed.shape[0] * packing)
    # Negative indices wrap in jnp, so dropped rows go past the end, each to a place of its own.
    outside = packed.shape[0] + jnp.arange(loc.shape[0], dtype=jnp.int32)
    return _set(packed, jnp.where(inside, loc // packing, outside), loc % packing, rows).reshape(cache.shape)


def _set(packed: jax.Array, index: jax.Array, lane: jax.Array, rows: jax.Array) -> jax.Array:
    """`packed` [M, packing, width] with `rows` at the distinct (index, lane); an index past the end is dropped."""

    def as_they_are(packed: jax.Array, rows: jax.Array) -> jax.Array:
        return packed.at[index, lane].set(rows, mode="drop", unique_indices=True)

    def as_integers(packed: jax.Array, rows: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * packed.dtype.itemsize}")
        written = as_they_are(*(jax.lax.bitcast_convert_type(x, bits) for x in (packed, rows)))
        return jax.lax.bitcast_convert_type(written, packed.dtype)

    # XLA for CPU widens a scatter of narrow floats, which alters NaNs even in rows that aren't written; XLA for TPU
    # moves them as they are, but would copy the whole cache to see it as integers.
    return jax.lax.platform_dependent(packed, rows, cpu=as_integers, default=as_they_are)
