"""Refuse calls that mean nothing, before anything is written: shapes, dtypes and options, then values."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.checks import require
from kernels.dense_mla.masking import DEFAULT_MASK_VALUE
from kernels.layout import LANES, align, cdiv, packing

_Q_DTYPES = ("float32", "bfloat16")
_KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def static_validate_inputs(
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
) -> None:
    """Raise ValueError unless shapes, dtypes and options of a `mla_ragged_paged_attention` call fit together.

    Takes that function's arguments, reads no value of an array, and so works while tracing. The message names the
    argument, what was found and what is wanted.
    """
    for name, q in (("ql_nope", ql_nope), ("q_pe", q_pe)):
        _require_rank(name, q, 3)
        require(jnp.dtype(q.dtype).name in _Q_DTYPES, name, f"dtype {q.dtype}", f"a dtype of {_Q_DTYPES}")
        require(min(q.shape[1:]) > 0, name, f"shape {q.shape}", "at least one head and one column")
    require(q_pe.dtype == ql_nope.dtype, "q_pe", f"dtype {q_pe.dtype}", f"{ql_nope.dtype} as ql_nope has")
    _require_shape("q_pe", q_pe, (*ql_nope.shape[:2], q_pe.shape[2]), "T and H of ql_nope")
    validate_cache_update(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, kv_lens, page_indices, cu_q_lens, distribution)
    tokens, _, latent = ql_nope.shape
    _require_shape("new_kv_c", new_kv_c, (tokens, latent), "T and L of ql_nope")
    _require_shape("new_k_pe", new_k_pe, (tokens, q_pe.shape[2]), "T and R of q_pe")

    _require_number("sm_scale", sm_scale)
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _require_number(name, scale)
    if soft_cap is not None:
        _require_number("soft_cap", soft_cap)
        require(soft_cap > 0, "soft_cap", soft_cap, "a number above 0, or None")
    if mask_value is not None:
        _require_number("mask_value", mask_value, infinite=True)
        require(mask_value < math.inf, "mask_value", mask_value, "a number below infinity, or None")
    for name, count in (
        ("sliding_window", sliding_window),
        ("chunk_prefill_size", chunk_prefill_size),
        ("num_kv_pages_per_block", num_kv_pages_per_block),
        ("num_queries_per_block", num_queries_per_block),
        ("vmem_limit_bytes", vmem_limit_bytes),
    ):
        if count is not None:
            _require_count(name, count)
    require(isinstance(debug_mode, bool), "debug_mode", _describe(debug_mode), "True or False")


def dynamic_validate_inputs(
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
) -> None:
    """Raise ValueError unless a `mla_ragged_paged_attention` call is valid in its values too.

    Takes that function's arguments; the four index arrays must be concrete. What stands behind the active sequences,
    and in page table columns behind the last page in use, is not looked at.
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
        chunk_prefill_size=chunk_prefill_size,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
        debug_mode=debug_mode,
    )
    num_seqs = kv_lens.shape[0]
    decode_end, chunk_end, active = (int(x) for x in np.asarray(distribution))
    require(
        0 <= decode_end <= chunk_end <= active <= num_seqs,
        "distribution",
        (decode_end, chunk_end, active),
        f"(i, j, n) with 0 <= i <= j <= n <= {num_seqs}",
    )
    ends = np.asarray(cu_q_lens)[: active + 1].astype(np.int64)
    require(ends[0] == 0, "cu_q_lens", f"first value {ends[0]}", "first value 0")
    kv_len = np.asarray(kv_lens)[:active].astype(np.int64)
    q_len = np.diff(ends)
    _require_each("cu_q_lens", q_len > 0, q_len, "q_len", "q_len above 0")
    require(
        ends[-1] <= ql_nope.shape[0], "cu_q_lens", f"{ends[-1]} tokens", f"at most the {ql_nope.shape[0]} of ql_nope"
    )
    _require_each("distribution", q_len[:decode_end] == 1, q_len, "q_len", f"q_len 1 of sequences below {decode_end}")
    if chunk_prefill_size is not None:
        is_chunk = np.arange(active) >= decode_end
        holds = ~is_chunk[:chunk_end] | (q_len[:chunk_end] == chunk_prefill_size)
        wanted = f"q_len {chunk_prefill_size} of sequences from {decode_end} up to {chunk_end}"
        _require_each("chunk_prefill_size", holds, q_len, "q_len", wanted)
    _require_each("kv_lens", kv_len >= q_len, kv_len, "kv_len", "kv_len no less than q_len")
    num_pages, rows, lanes, _ = cache_kv_c.shape
    _require_pages(np.asarray(page_indices).reshape(num_seqs, -1)[:active], kv_len, q_len, num_pages, rows * lanes)


def validate_cache_update(
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv_c: jax.Array,
    cache_k_pe: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> None:
    """Raise ValueError unless the arguments of `update_kv_cache` fit together; no value of an array is read."""
    for name, rows in (("new_kv_c", new_kv_c), ("new_k_pe", new_k_pe)):
        _require_rank(name, rows, 2)
        require(jnp.dtype(rows.dtype).name in _KV_DTYPES, name, f"dtype {rows.dtype}", f"a dtype of {_KV_DTYPES}")
        require(rows.dtype == new_kv_c.dtype, name, f"dtype {rows.dtype}", f"{new_kv_c.dtype} as new_kv_c has")
        require(rows.shape[1] > 0, name, f"shape {rows.shape}", "at least one column")
    _require_shape("new_k_pe", new_k_pe, (new_kv_c.shape[0], new_k_pe.shape[1]), "T of new_kv_c")
    for name, cache, rows in (("cache_kv_c", cache_kv_c, new_kv_c), ("cache_k_pe", cache_k_pe, new_k_pe)):
        _require_rank(name, cache, 4)
        require(cache.dtype == rows.dtype, name, f"dtype {cache.dtype}", f"{rows.dtype} as the new rows have")
        require(min(cache.shape) > 0, name, f"shape {cache.shape}", "at least one page and one row")
        wanted = (*cache_kv_c.shape[:2], packing(rows.dtype), align(rows.shape[1], LANES))
        _require_shape(name, cache, wanted, "pages and rows of cache_kv_c, packing of the dtype, width in whole lanes")
    for name, indices in (
        ("kv_lens", kv_lens),
        ("page_indices", page_indices),
        ("cu_q_lens", cu_q_lens),
        ("distribution", distribution),
    ):
        _require_rank(name, indices, 1)
        require(indices.dtype == jnp.int32, name, f"dtype {indices.dtype}", "int32")
    num_seqs = kv_lens.shape[0]
    require(num_seqs > 0, "kv_lens", f"shape {kv_lens.shape}", "at least one sequence slot")
    whole = page_indices.shape[0] > 0 and page_indices.shape[0] % num_seqs == 0
    require(
        whole, "page_indices", f"length {page_indices.shape[0]}", f"a positive multiple of {num_seqs} sequence slots"
    )
    _require_shape("cu_q_lens", cu_q_lens, (num_seqs + 1,), "one more than the sequence slots of kv_lens")
    _require_shape("distribution", distribution, (3,), "the bounds (i, j, n)")


def _require_pages(table: np.ndarray, kv_len: np.ndarray, q_len: np.ndarray, num_pages: int, page_size: int) -> None:
    """Check the page table [n, W] of n active sequences: long enough, within the cache, no slot written twice."""
    width = table.shape[1]
    fits = kv_len <= width * page_size
    _require_each("kv_lens", fits, kv_len, "kv_len", f"at most {width} pages of {page_size} tokens a sequence")
    last_new = np.repeat(np.cumsum(q_len), q_len)
    position = np.repeat(kv_len, q_len) - last_new + np.arange(last_new.size)
    for seq, (pages, length) in enumerate(zip(table, kv_len, strict=True)):
        used = pages[: cdiv(int(length), page_size)]
        bad = np.flatnonzero((used < 0) | (used >= num_pages))
        found = f"page {used[bad[0]]} in column {bad[0]} of sequence {seq}" if bad.size else ""
        require(not bad.size, "page_indices", found, f"pages from 0 up to {num_pages} in the columns in use")
    seq = np.repeat(np.arange(len(q_len)), q_len)
    slot = table[seq, position // page_size].astype(np.int64) * page_size + position % page_size
    _, first, count = np.unique(slot, return_index=True, return_counts=True)
    twice = first[count > 1]
    found = ""
    if twice.size:
        writers = np.flatnonzero(slot == slot[twice[0]])[:2]
        found = (
            f"page {slot[twice[0]] // page_size} slot {slot[twice[0]] % page_size} written by tokens {writers.tolist()}"
        )
    require(not twice.size, "page_indices", found, "each slot written by one token at most")


def _require_each(argument: str, holds: np.ndarray, values: np.ndarray, what: str, wanted: str) -> None:
    """Require `holds` of every sequence, naming the first that fails and its value."""
    failing = np.flatnonzero(~holds)
    found = f"{what} {values[failing[0]]} of sequence {failing[0]}" if failing.size else ""
    require(not failing.size, argument, found, wanted)


def _require_rank(argument: str, array: jax.Array, rank: int) -> None:
    require(array.ndim == rank, argument, f"shape {array.shape}", f"{rank} dimensions")


def _require_shape(argument: str, array: jax.Array, shape: tuple[int, ...], why: str) -> None:
    require(array.shape == shape, argument, f"shape {array.shape}", f"{shape} ({why})")


def _require_number(argument: str, value: Any, *, infinite: bool = False) -> None:
    """Require a real Python or NumPy number: options are baked into the compiled kernel, so no traced value can be."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number, argument, _describe(value), "a Python number, known while tracing")
    finite = not math.isnan(value) if infinite else math.isfinite(value)
    require(finite, argument, value, "a number that is not NaN" if infinite else "a finite number")


def _require_count(argument: str, value: Any) -> None:
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(is_count, argument, _describe(value), "a Python integer, known while tracing")
    require(value > 0, argument, value, "an integer above 0")


def _describe(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"
