"""The matrix product of both kernels."""

import jax
import jax.numpy as jnp


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """a . b over one axis of each, summed in float32; float32 inputs keep all their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
