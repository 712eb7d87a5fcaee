"""The public entry: validate, write the new rows, attend."""

import jax

from kernels.dense_mla import kernel
from kernels.dense_mla.cache import write_new_rows
from kernels.dense_mla.masking import DEFAULT_MASK_VALUE
from kernels.dense_mla.plan import Options, make_plan
from kernels.dense_mla.prepare import prepare_outputs, prepare_q_inputs
from kernels.dense_mla.validation import dynamic_validate_inputs, static_validate_inputs


def mla_ragged_paged_attention(
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
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the new rows of a ragged batch into the paged caches, then attend to them (absorbed MLA).

    For query t of sequence s, at position p = kv_len - q_len + t, over the keys k < kv_len:

        score_k = sm_scale * q_scale * k_scale * (ql_nope . c_k + q_pe . r_k)
        score_k = soft_cap * tanh(score_k / soft_cap)
        score_k = mask_value unless p - sliding_window < k <= p
        out = v_scale * sum_k softmax(score)_k * c_k

    The absorbed form is DeepSeek-V2's (arXiv:2405.04434, section 2.1): one latent row is key and value of all heads.
    Scores, softmax and sums are float32, probabilities too unless both queries and cache are narrower than 32 bits.

    Args:
      ql_nope: absorbed queries [T, H, L], float32 or bfloat16.
      q_pe: rotary queries [T, H, R], of the same dtype.
      new_kv_c: new latent rows [T, L], float32, bfloat16, float8_e4m3fn or float8_e5m2.
      new_k_pe: new rope rows [T, R], of the same dtype.
      cache_kv_c: latent cache [N, page_size / packing, packing, align(L, 128)], of the new rows' dtype; packing tokens
        share a 32-bit sublane. Donated.
      cache_k_pe: rope cache [N, page_size / packing, packing, align(R, 128)]. Donated.
      kv_lens: [S] int32, keys of each sequence, the new ones included.
      page_indices: [S * W] int32, the physical pages of each sequence; columns behind the last used page hold anything.
      cu_q_lens: [S + 1] int32, cumulative query counts; only the first n + 1 values count.
      distribution: [3] int32 (i, j, n): sequences [0, i) decode one query each, [i, j) prefill in chunks, [j, n) do
        either; slots behind n are idle and their metadata hold anything.
      sm_scale: factor of the scores, a Python number like every option here.
      sliding_window: how many keys, itself included, a query sees back; None for all.
      soft_cap: bound of the scores; None for none.
      mask_value: score of masked keys below kv_len; None for the default, which leaves them no weight. With a mild
        value every key below kv_len is fetched and weighed.
      q_scale, k_scale, v_scale: dequantisation factors of queries, keys and values; None for 1.
      chunk_prefill_size: promise that each sequence in [i, j) has this many queries; only sizes their blocks.
      num_kv_pages_per_block: pages of keys computed at a time; None for about 512 keys.
      num_queries_per_block: queries computed at a time; None for about 512 query heads.
      vmem_limit_bytes: VMEM that the kernel may take; None for the compiler's default.
      debug_mode: print each sequence and block as the kernel reaches it.

    Returns:
      out [T, H, L] in the queries' dtype, zero in rows at or past cu_q_lens[n]; and the two updated caches.

    Raises:
      ValueError: an argument doesn't fit the others. Values are checked only where the index arrays are concrete, not
        traced; a traced sequence without queries is skipped.
    """
    options = {
        "sm_scale": sm_scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "mask_value": mask_value,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "chunk_prefill_size": chunk_prefill_size,
        "num_kv_pages_per_block": num_kv_pages_per_block,
        "num_queries_per_block": num_queries_per_block,
        "vmem_limit_bytes": vmem_limit_bytes,
        "debug_mode": debug_mode,
    }
    metadata = (kv_lens, page_indices, cu_q_lens, distribution)
    arrays = (ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, *metadata)
    traced = any(isinstance(x, jax.core.Tracer) for x in metadata)
    validate = static_validate_inputs if traced else dynamic_validate_inputs
    validate(*arrays, **options)
    return _write_and_attend(*arrays, options=Options(**options))


def _write_and_attend_traced(
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
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arguments of `mla_ragged_paged_attention`, validated."""
    metadata = (kv_lens, page_indices, cu_q_lens, distribution)
    caches = write_new_rows(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, *metadata)
    if ql_nope.shape[0] == 0:
        return ql_nope, *caches
    plan = make_plan(ql_nope, q_pe, cache_kv_c, kv_lens, page_indices, options)
    with jax.named_scope(plan.name):
        out = kernel.attend(plan, prepare_q_inputs(ql_nope), prepare_q_inputs(q_pe), *caches, *metadata)
        return prepare_outputs(out, *ql_nope.shape[1:]), *caches


_write_and_attend = jax.jit(
    _write_and_attend_traced, static_argnames="options", donate_argnames=("cache_kv_c", "cache_k_pe")
)
