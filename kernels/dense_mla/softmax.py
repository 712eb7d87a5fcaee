"""Online softmax in float32 over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.dense_mla.masking import DEFAULT_MASK_VALUE
from kernels.dense_mla.plan import Plan
from kernels.dense_mla.schedule import QueryBlock, Scalar
from kernels.layout import LANES, cdiv, packing
from kernels.products import dot

Ref = Any

_WORD_BITS = {1: (-1,), 2: (0x0000FFFF, -0x00010000)}
"""Bits of a 32-bit word, as int32, that each of the rows sharing it holds, by the number of these rows."""


def _spread(x: jax.Array, width: int) -> jax.Array:
    """Widen [rows, 128] of equal lanes to [rows, width]: whole vectors repeated, so no lane moves."""
    return jnp.concatenate([x] * cdiv(width, LANES), axis=1)[:, :width]


class Softmax:
    """Running maximum, denominator and weighted sum of the rows (query, head) of one query block.

    In VMEM: `maximum` [rows, 128] holds equal lanes, `denominator` [rows, sum_lanes] partial sums of a lane's keys,
    `weighted` [rows, latent width] the sum of the values.
    """

    def __init__(self, plan: Plan, num_queries: int, maximum: Ref, denominator: Ref, weighted: Ref) -> None:
        self._plan, self._num_queries = plan, num_queries
        self._rows = pl_rows = slice(0, num_queries * plan.num_heads)
        self._maximum, self._denominator, self._weighted = maximum, denominator, weighted
        # The lowest of all scores: the first block's maximum replaces it. Finite, so that no difference is NaN.
        maximum[pl_rows] = jnp.full((pl_rows.stop, LANES), DEFAULT_MASK_VALUE, jnp.float32)
        denominator[pl_rows] = jnp.zeros((pl_rows.stop, plan.sum_lanes), jnp.float32)
        weighted[pl_rows] = jnp.zeros((pl_rows.stop, plan.latent_width), jnp.float32)

    def add(self, queries: jax.Array, keys: jax.Array, block: QueryBlock, first_key: Scalar) -> None:
        """Take in one block of keys.

        Args:
          queries: [rows, width]; rows of unused queries may hold anything.
          keys: [keys, width], the first of which is key `first_key` of the sequence; rows outside
            [block.first_key, block.end_key) may hold anything.
          block: the query block.
          first_key: int32 scalar.
        """
        plan, rows = self._plan, self._rows
        scores = self._masked(self._scaled(dot(queries, keys, (1, 1))), block, first_key)
        old_maximum = self._maximum[rows]
        maximum = jnp.maximum(old_maximum, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp(old_maximum - maximum)
        weights = jnp.exp(scores - _spread(maximum, plan.keys_per_block))
        lanes = plan.sum_lanes
        partial_sums = sum(weights[:, i : i + lanes] for i in range(0, plan.keys_per_block, lanes))
        values = self._values(keys, block, first_key)
        self._maximum[rows] = maximum
        self._denominator[rows] = self._denominator[rows] * _spread(decay, lanes) + partial_sums
        self._weighted[rows] = self._weighted[rows] * _spread(decay, plan.latent_width) + dot(
            weights.astype(values.dtype), values, (1, 0)
        )

    def result(self) -> jax.Array:
        """The block's output [queries, heads, latent width] in the queries' dtype."""
        plan, rows = self._plan, self._rows
        factor = plan.value_scale / jnp.sum(self._denominator[rows], axis=1, keepdims=True)
        output = (self._weighted[rows] * factor).astype(plan.q_dtype)
        return output.reshape(self._num_queries, plan.num_heads, plan.latent_width)

    def _scaled(self, scores: jax.Array) -> jax.Array:
        plan = self._plan
        if plan.soft_cap is None:
            return scores * plan.score_scale
        return plan.soft_cap * jnp.tanh(scores * (plan.score_scale / plan.soft_cap))

    def _masked(self, scores: jax.Array, block: QueryBlock, first_key: Scalar) -> jax.Array:
        """Scores [rows, keys], with those of masked keys replaced."""
        plan = self._plan
        shape = (self._num_queries, plan.num_heads, plan.keys_per_block)
        query = jax.lax.broadcasted_iota(jnp.int32, shape, 0).reshape(scores.shape)
        key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        ahead = key - query
        here = block.position - first_key
        visible = ahead <= here
        if plan.window is not None:
            visible &= ahead > here - plan.window
        scores = jnp.where(visible, scores, plan.mask_value)
        if plan.masked_keys_count:
            scores = jnp.where(key < block.end_key - first_key, scores, DEFAULT_MASK_VALUE)
        return scores

    def _values(self, keys: jax.Array, block: QueryBlock, first_key: Scalar) -> jax.Array:
        """Latent columns of the keys, with zeros in rows that no query may see: a weight of zero leaves NaN a NaN."""
        values = keys[:, : self._plan.latent_width]
        # Rows are cleared in the 32-bit words they share: TPUs don't select 16-bit values under a 32-bit mask.
        rows_per_word = packing(values.dtype)
        words = pltpu.bitcast(values, jnp.int32)
        key = first_key + rows_per_word * jax.lax.broadcasted_iota(jnp.int32, words.shape, 0)
        kept = jnp.zeros_like(words)
        for row in range(rows_per_word):
            seen = (key + row >= block.first_key) & (key + row < block.end_key)
            kept |= jnp.where(seen, _WORD_BITS[rows_per_word][row], 0)
        return pltpu.bitcast(words & kept, values.dtype)
