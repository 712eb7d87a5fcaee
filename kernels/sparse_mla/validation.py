"""Refuse sparse MLA calls that mean nothing, while tracing, before anything is computed."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.checks import require
from kernels.layout import LANES, align, cdiv

_DTYPES = ("float32", "bfloat16")


def require_rank(argument: str, array: jax.Array, rank: int) -> None:
    """Require an array of `rank` dimensions."""
    require(array.ndim == rank, argument, f"shape {array.shape}", f"{rank} dimensions")


def require_shape(argument: str, array: jax.Array, shape: tuple[int, ...], why: str) -> None:
    """Require an array of exactly this shape."""
    require(array.shape == shape, argument, f"shape {array.shape}", f"{shape} ({why})")


def require_int32(argument: str, array: jax.Array) -> None:
    """Require int32 values."""
    require(array.dtype == jnp.int32, argument, f"dtype {array.dtype}", "int32")


def require_float(argument: str, array: jax.Array) -> None:
    """Require a dtype that the kernel takes for keys and queries."""
    require(jnp.dtype(array.dtype).name in _DTYPES, argument, f"dtype {array.dtype}", f"a dtype of {_DTYPES}")


def require_count(argument: str, value: Any, *, least: int = 1) -> None:
    """Require a Python integer of at least `least`: it shapes the compiled kernel, so no traced value can be one."""
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(is_count, argument, _describe(value), "a Python integer, known while tracing")
    require(value >= least, argument, value, f"an integer of at least {least}")


def require_scale(argument: str, value: Any) -> None:
    """Require a finite Python number: it is baked into the compiled kernel, so no traced value can be one."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number, argument, _describe(value), "a Python number, known while tracing")
    require(math.isfinite(value), argument, value, "a finite number")


def validate_attention(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    positions: jax.Array,
    *,
    kv_lora_rank: Any,
    read_block: Any,
    block_units: Any,
    sm_scale: Any,
    page_table: jax.Array | None,
    page_size: Any,
    seq_len: Any,
    q_seq_id: jax.Array | None,
    seq_lens: jax.Array | None,
    cu_kv_lens: jax.Array | None,
    page_indices: jax.Array | None,
) -> None:
    """Raise ValueError unless the arguments of `sparse_mla_attention` fit together; no value of an array is read."""
    require_scale("sm_scale", sm_scale)
    for name, count in (("block_units", block_units), ("read_block", read_block), ("kv_lora_rank", kv_lora_rank)):
        require_count(name, count)
    _validate_queries(q, indices, positions)
    require(kv_lora_rank <= q.shape[3], "kv_lora_rank", kv_lora_rank, f"1 up to Dk, the {q.shape[3]} columns of q")
    require(kv.ndim in (3, 4), "kv", f"shape {kv.shape}", "3 dimensions (flat) or 4 (paged)")
    require_float("kv", kv)
    require(kv.dtype == q.dtype, "kv", f"dtype {kv.dtype}", f"{q.dtype} as q has")
    ragged = {"q_seq_id": q_seq_id, "seq_lens": seq_lens, "cu_kv_lens": cu_kv_lens, "page_indices": page_indices}
    paged = {"page_table": page_table, "seq_len": seq_len}
    if kv.ndim == 3:
        for name, given in {**ragged, **paged, "page_size": page_size}.items():
            require(given is None, name, "a value", "None with flat kv [B, T, Dk]")
        require_shape("kv", kv, (q.shape[0], kv.shape[1], q.shape[3]), "B and Dk of q")
        return
    _validate_pages("kv", kv, q.shape[3], page_size, read_block)
    if any(array is not None for array in ragged.values()):
        for name, given in paged.items():
            require(given is None, name, "a value", "None with packed ragged requests")
        _validate_ragged(q, ragged)
    else:
        _validate_table(q, page_table, page_size, seq_len)


def _validate_queries(q: jax.Array, indices: jax.Array, positions: jax.Array) -> None:
    for name, array, rank in (("q", q, 4), ("indices", indices, 3), ("positions", positions, 2)):
        require_rank(name, array, rank)
    require_float("q", q)
    require(min(q.shape[2:]) > 0, "q", f"shape {q.shape}", "at least one head and one column")
    require_int32("indices", indices)
    require_int32("positions", positions)
    require_shape("indices", indices, (*q.shape[:2], indices.shape[2]), "B and S of q")
    require_shape("positions", positions, q.shape[:2], "B and S of q")


def _validate_pages(name: str, cache: jax.Array, width: int, page_size: Any, read_block: int) -> None:
    require(page_size is not None, "page_size", page_size, f"the tokens of a page of paged {name}")
    require_count("page_size", page_size)
    _, rows, packing, found = cache.shape
    require(rows * packing > 0, name, f"shape {cache.shape}", "at least one token a page")
    require(page_size % packing == 0, "page_size", page_size, f"a multiple of the packing {packing} of {name}")
    require(page_size == rows * packing, "page_size", page_size, f"{rows * packing} tokens, as a page of {name} has")
    require(page_size % read_block == 0, "read_block", read_block, f"a divisor of page_size {page_size}")
    wanted = align(width, LANES)
    require(found == wanted, name, f"last axis {found}", f"{wanted}, the {width} columns of a key in whole lanes")


def _validate_table(q: jax.Array, page_table: jax.Array | None, page_size: int, seq_len: Any) -> None:
    require(page_table is not None, "page_table", page_table, "[B, pages] int32, or the arguments of ragged requests")
    require(seq_len is not None, "seq_len", seq_len, "the length of every row of paged kv")
    require_count("seq_len", seq_len, least=0)
    require_rank("page_table", page_table, 2)
    require_int32("page_table", page_table)
    wanted = (q.shape[0], cdiv(seq_len, page_size))
    require_shape("page_table", page_table, wanted, "B of q, the pages of seq_len tokens")


def _validate_ragged(q: jax.Array, ragged: dict[str, jax.Array | None]) -> None:
    require(q.shape[0] == 1, "q", f"B = {q.shape[0]}", "B = 1 with packed ragged requests")
    _require_indices(ragged)
    require_shape("q_seq_id", ragged["q_seq_id"], (q.shape[1],), "S of q")
    require_shape("cu_kv_lens", ragged["cu_kv_lens"], (len(ragged["seq_lens"]) + 1,), "one more than seq_lens")


def _require_indices(arrays: dict[str, jax.Array | None]) -> None:
    for name, array in arrays.items():
        require(array is not None, name, None, "an int32 array, as packed ragged requests need")
        require_rank(name, array, 1)
        require_int32(name, array)


def validate_prefill(
    ql: jax.Array,
    qpe: jax.Array,
    kvc: jax.Array,
    kpe: jax.Array,
    cache: jax.Array,
    topk_pages: jax.Array,
    positions: jax.Array,
    loc: jax.Array,
    *,
    kv_lora_rank: Any,
    page_size: Any,
    sm_scale: Any,
    read_block: Any,
) -> None:
    """Raise ValueError unless the arguments of both prefill functions fit together; no value of an array is read."""
    require_scale("sm_scale", sm_scale)
    for name, count in (("page_size", page_size), ("kv_lora_rank", kv_lora_rank), ("read_block", read_block)):
        require_count(name, count)
    floats = {"ql": (ql, 3), "qpe": (qpe, 3), "kvc": (kvc, 2), "kpe": (kpe, 2), "cache": (cache, 4)}
    for name, (array, rank) in floats.items():
        require_rank(name, array, rank)
        require_float(name, array)
        require(array.dtype == ql.dtype, name, f"dtype {array.dtype}", f"{ql.dtype} as ql has")
    for name, array, rank in (("topk_pages", topk_pages, 2), ("positions", positions, 1), ("loc", loc, 1)):
        require_rank(name, array, rank)
        require_int32(name, array)
    tokens, heads, latent = ql.shape
    require(heads > 0, "ql", f"shape {ql.shape}", "at least one head")
    require(kv_lora_rank == latent, "kv_lora_rank", kv_lora_rank, f"{latent}, the columns of ql")
    require_shape("qpe", qpe, (tokens, heads, qpe.shape[2]), "T and H of ql")
    require_shape("kvc", kvc, (tokens, latent), "T and latent width of ql")
    require_shape("kpe", kpe, (tokens, qpe.shape[2]), "T and rope width of qpe")
    require_shape("topk_pages", topk_pages, (tokens, topk_pages.shape[1]), "T of ql")
    require_shape("positions", positions, (tokens,), "T of ql")
    require_shape("loc", loc, (tokens,), "T of ql")
    _validate_pages("cache", cache, latent + qpe.shape[2], page_size, read_block)


def validate_requests(
    seq_lens: jax.Array, cu_q_lens: jax.Array, cu_kv_lens: jax.Array, page_indices: jax.Array
) -> None:
    """Raise ValueError unless the arrays that describe packed requests fit together; no value is read."""
    offsets = {"cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens}
    _require_indices({"seq_lens": seq_lens, "page_indices": page_indices, **offsets})
    for name, array in offsets.items():
        require_shape(name, array, (seq_lens.shape[0] + 1,), "one more than the requests of seq_lens")


def validate_locations(loc: jax.Array, num_pages: int, page_size: int) -> None:
    """Raise ValueError if `loc` is concrete and token t isn't at slot t % page_size of its page, or slots repeat.

    The page of a token is that of the page's first token, which so can't be padding when another one is written.
    """
    if isinstance(loc, jax.core.Tracer):
        return
    slots = np.asarray(loc).astype(np.int64)
    written = (slots >= 0) & (slots < num_pages * page_size)
    token = np.arange(slots.size)
    expressed = slots[token - token % page_size] // page_size * page_size + token % page_size
    wrong = np.flatnonzero(written & (slots != expressed))
    found = f"slot {slots[wrong[0]]} of token {wrong[0]}" if wrong.size else ""
    wanted = "token t at slot t % page_size of the page of token t - t % page_size, as one request from position 0 has"
    require(not wrong.size, "loc", found, wanted)
    named, times = np.unique(slots[written], return_counts=True)
    require(not (times > 1).any(), "loc", f"slots {named[times > 1][:4]} more than once", "distinct slots")


def _describe(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"
