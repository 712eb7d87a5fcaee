"""What a masked key is worth, and whether blocks that hold only masked keys may be left out."""

import math

import jax.numpy as jnp

DEFAULT_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a masked key: far below any real score, and still finite after a subtraction of two of them."""

_LEAST_UNCAPPED_SCORE = -1e30
_WEIGHTLESS_GAP = 128.0


def masked_keys_are_weightless(mask_value: float, soft_cap: float | None) -> bool:
    """Whether a key scored `mask_value` has a softmax weight of exactly zero beside any unmasked key, in float32.

    exp(-104) is already zero in float32, and every query sees at least its own key. A soft cap bounds that key's score
    by -soft_cap; without one, scores below -1e30 are taken as out of the question. When this holds, keys that no query
    of a block sees need neither be fetched nor computed; when it doesn't, each key below kv_len keeps some weight.
    """
    lowest_score = _LEAST_UNCAPPED_SCORE if soft_cap is None else -soft_cap
    return mask_value <= lowest_score - _WEIGHTLESS_GAP or math.isinf(mask_value)
