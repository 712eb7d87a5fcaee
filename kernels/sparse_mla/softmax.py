"""Online softmax in float32 over chunks of gathered keys (Milakov and Gimelshein, arXiv:1805.02867)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kernels.layout import LANES, cdiv, packing
from kernels.products import dot
from kernels.sparse_mla.selection import WORD_BITS

Ref = Any

_PIECE = 128
"""Keys that enter the value product at a time."""


class Softmax:
    """Running maximum, denominator (equal lanes of [H, 128]) and weighted sum [H, kv_lora_rank] of one query."""

    def __init__(
        self, kv_lora_rank: int, sm_scale: float, words: Ref, maximum: Ref, denominator: Ref, weighted: Ref
    ) -> None:
        self._kv_lora_rank, self._sm_scale, self._words = kv_lora_rank, sm_scale, words
        self._maximum, self._denominator, self._weighted = maximum, denominator, weighted

    def clear(self) -> None:
        """Start a query."""
        # The lowest finite number: below any score, yet its difference to a masked score is no NaN.
        self._maximum[...] = jnp.full_like(self._maximum, jnp.finfo(jnp.float32).min)
        self._denominator[...] = jnp.zeros_like(self._denominator)
        self._weighted[...] = jnp.zeros_like(self._weighted)

    def add(self, q: jax.Array, gathered: jax.Array, attended: jax.Array, attended_in_word: jax.Array) -> None:
        """Take in one chunk.

        Args:
          q: [H, Dk].
          gathered: [keys, Dk or more], rows of keys not attended may hold anything.
          attended: [1, keys] int32, 1 for a key to attend, else 0.
          attended_in_word: [packing, whole lanes] int32, the same by row of 32-bit words and token in it.
        """
        # Held as words: what a scratch of bfloat16 gives back, v5e has to put together again.
        self._words[...] = _only_attended(gathered, attended_in_word)
        scores = dot(q, self._rows(0, gathered.shape[0], q.shape[1], q.dtype), (1, 1)) * self._sm_scale
        scores = jnp.where(attended != 0, scores, -jnp.inf)
        old_maximum = self._maximum[:, :1]
        maximum = jnp.maximum(old_maximum, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp(old_maximum - maximum)
        # The denominator sums the weights as the value product sees them: rounding that all weights share, as it does
        # when they are equal, then cancels instead of scaling the output.
        weights = jnp.exp(scores - maximum).astype(q.dtype)
        total = jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
        # In pieces, so that the compiler needn't hold all values at once.
        added = sum(
            dot(weights[:, i : i + _PIECE], self._rows(i, i + _PIECE, self._kv_lora_rank, q.dtype), (1, 0))
            for i in range(0, gathered.shape[0], _PIECE)
        )
        self._maximum[...] = jnp.broadcast_to(maximum, self._maximum.shape)
        self._denominator[...] = self._denominator[...] * decay + total
        self._weighted[...] = self._weighted[...] * decay + added

    def _rows(self, start: int, stop: int, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Rows `start` to `stop` of the chunk, their first `width` columns, from the words that hold them."""
        a_word = packing(dtype)
        return pltpu.bitcast(self._words[start // a_word : stop // a_word], dtype)[:, :width]

    def result(self) -> jax.Array:
        """The query's output [H, kv_lora_rank] float32; zeros if no key was attended."""
        denominator = self._denominator[:, :1]
        return jnp.where(denominator > 0, self._weighted[...] / denominator, 0.0)


def _only_attended(gathered: jax.Array, attended_in_word: jax.Array) -> jax.Array:
    """Words of `gathered` with zeros in rows not attended, as a weight of zero leaves NaN a NaN.

    The rows are cleared as 32-bit words, which all TPUs handle alike. Their masks lie along lanes and are turned by a
    transposition, a vector of 128 equal columns at a time.
    """
    width = gathered.shape[1]
    words = pltpu.bitcast(gathered, jnp.int32)
    a_word, lanes = attended_in_word.shape
    bits = WORD_BITS // a_word
    kept = sum(
        attended_in_word[i : i + 1] * np.uint32((2**bits - 1) << bits * i).astype(np.int32) for i in range(a_word)
    )
    kept = jnp.broadcast_to(kept, (LANES, lanes)).T[: words.shape[0]]
    kept = jnp.concatenate([kept] * cdiv(width, LANES), axis=1)[:, :width]
    return words & kept
