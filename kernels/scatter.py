"""Scatter rows into a cache without changing a bit of anything else."""

import jax
import jax.numpy as jnp


def scatter_rows(cache: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """`cache[index] = rows`, for distinct indices; one past the end drops its row."""

    def as_they_are(cache: jax.Array, rows: jax.Array) -> jax.Array:
        return cache.at[index].set(rows, mode="drop", unique_indices=True)

    def as_integers(cache: jax.Array, rows: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * cache.dtype.itemsize}")
        written = as_they_are(*(jax.lax.bitcast_convert_type(x, bits) for x in (cache, rows)))
        return jax.lax.bitcast_convert_type(written, cache.dtype)

    # XLA for CPU widens a scatter of narrow floats, which alters NaNs even in rows that aren't written; XLA for TPU
    # moves them as they are, but would copy the whole cache to see it as integers.
    return jax.lax.platform_dependent(cache, rows, cpu=as_integers, default=as_they_are)
