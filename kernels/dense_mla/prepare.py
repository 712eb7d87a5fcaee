"""Pad queries and new cache rows to the kernel's tiles, and cut its output back."""

import jax
import jax.numpy as jnp

from kernels.layout import LANES, SUBLANES, align, packing


def prepare_q_inputs(q: jax.Array) -> jax.Array:
    """Pad queries [T, H, D] with zeros to [T, align(H, 8 * packing), align(D, 128)], whole tiles of q's dtype."""
    _, heads, width = q.shape
    padded_heads = align(heads, SUBLANES * packing(q.dtype))
    return jnp.pad(q, ((0, 0), (0, padded_heads - heads), (0, align(width, LANES) - width)))


def prepare_kv_inputs(kv: jax.Array) -> jax.Array:
    """Pad new cache rows [T, D] with zeros to [T, align(D, 128)], the width of a cache row."""
    width = kv.shape[-1]
    return jnp.pad(kv, ((0, 0), (0, align(width, LANES) - width)))


def prepare_outputs(out: jax.Array, num_heads: int, width: int) -> jax.Array:
    """Cut the kernel's output [T, padded heads, padded width] back to [T, num_heads, width]."""
    return out[:, :num_heads, :width]
