"""Write token rows into a paged cache."""

import jax
import jax.numpy as jnp

from kernels.scatter import scatter_rows


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
    index = jnp.where(inside, loc // packing, outside)
    return scatter_rows(packed, (index, loc % packing), rows).reshape(cache.shape)
