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
    _validate_pages(q, kv, page_size, read_block)
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


def _validate_pages(q: jax.Array, kv: jax.Array, page_size: Any, read_block: int) -> None:
    require(page_size is not None, "page_size", page_size, "the tokens of a page of paged kv")
    require_count("page_size", page_size)
    _, rows, packing, width = kv.shape
    require(rows * packing > 0, "kv", f"shape {kv.shape}", "at least one token a page")
    require(page_size % packing == 0, "page_size", page_size, f"a multiple of the packing {packing} of kv")
    require(page_size == rows * packing, "page_size", page_size, f"{rows * packing} tokens, as a page of kv has")
    require(page_size % read_block == 0, "read_block", read_block, f"a divisor of page_size {page_size}")
    wanted = align(q.shape[3], LANES)
    require(width == wanted, "kv", f"last axis {width}", f"{wanted}, the {q.shape[3]} columns of q in whole lanes")


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
    for name, array in ragged.items():
        require(array is not None, name, None, "an int32 array, as packed ragged requests need")
        require_rank(name, array, 1)
        require_int32(name, array)
    require_shape("q_seq_id", ragged["q_seq_id"], (q.shape[1],), "S of q")
    requests = ragged["seq_lens"].shape[0]
    require_shape("cu_kv_lens", ragged["cu_kv_lens"], (requests + 1,), "one more than the requests of seq_lens")


def _describe(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"
