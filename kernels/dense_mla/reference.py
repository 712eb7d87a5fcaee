"""The same attention in plain jnp: every sequence against its whole context, every weight at once."""

import jax
import jax.numpy as jnp

from kernels.dense_mla.cache import write_new_rows
from kernels.dense_mla.masking import DEFAULT_MASK_VALUE
from kernels.dense_mla.validation import static_validate_inputs


def ref_mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv_c: jax.Array,
    cache_k_pe: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `mla_ragged_paged_attention` computes, for the same arguments but those that tune it; nothing is donated.

    All arithmetic is float32. Rows of the output at or past cu_q_lens[n] are zero. Memory is T * H * W * page_size
    scores, and time S times that: meant for small batches.

    Raises:
      ValueError: shapes, dtypes or options don't fit together.
    """
    static_validate_inputs(
        ql_nope,
        q_pe,
        new_kv_c,
        new_k_pe,
        cache_kv_c,
        cache_k_pe,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    cache_kv_c, cache_k_pe = write_new_rows(
        new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, kv_lens, page_indices, cu_q_lens, distribution
    )
    num_tokens, _, latent = ql_nope.shape
    queries = jnp.concatenate([ql_nope, q_pe], axis=-1).astype(jnp.float32)
    table = page_indices.reshape(kv_lens.shape[0], -1)
    num_keys = table.shape[1] * cache_kv_c.shape[1] * cache_kv_c.shape[2]
    scale = sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
    token, key = jnp.arange(num_tokens)[:, None], jnp.arange(num_keys)

    def attend(seq: jax.Array, out: jax.Array) -> jax.Array:
        """`out` with the rows of one sequence filled in."""
        kv_len, start, end = kv_lens[seq], cu_q_lens[seq], cu_q_lens[seq + 1]
        in_range = key < kv_len
        page = jnp.where(in_range, jnp.repeat(table[seq], num_keys // table.shape[1]), 0)
        slot = key % (num_keys // table.shape[1])
        rows = jnp.concatenate(
            [
                cache[page, slot // cache.shape[2], slot % cache.shape[2], :width]
                for cache, width in ((cache_kv_c, latent), (cache_k_pe, q_pe.shape[2]))
            ],
            axis=-1,
        ).astype(jnp.float32)
        # Slots past kv_len may hold NaN, which a weight of zero would not remove.
        rows = jnp.where(in_range[:, None], rows, 0.0)
        scores = scale * jnp.einsum("thd,kd->thk", queries, rows, precision=jax.lax.Precision.HIGHEST)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position = kv_len - end + token
        visible = key <= position
        if sliding_window is not None:
            visible &= key > position - sliding_window
        scores = jnp.where(visible[:, None, :], scores, DEFAULT_MASK_VALUE if mask_value is None else mask_value)
        weights = jax.nn.softmax(jnp.where(in_range, scores, -jnp.inf), axis=-1)
        attended = jnp.einsum("thk,kd->thd", weights, rows[:, :latent], precision=jax.lax.Precision.HIGHEST)
        return jnp.where((start <= token)[..., None] & (token < end)[..., None], attended, out)

    out = jax.lax.fori_loop(0, distribution[2], attend, jnp.zeros(ql_nope.shape, jnp.float32))
    out = out * (1.0 if v_scale is None else v_scale)
    return out.astype(ql_nope.dtype), cache_kv_c, cache_k_pe
