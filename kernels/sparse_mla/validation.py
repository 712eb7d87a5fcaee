"""What `sparse_mla_attention` refuses: everything here is static, so it works while tracing."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.checks import require
from kernels.layout import LANES, align, packing

FLOATS = (jnp.bfloat16, jnp.float32)


def require_number(argument: str, value: Any) -> None:
    """Refuse a value that isn't a finite Python number; one computed under jit is a tracer, whose value nobody knows.

    Raises:
      ValueError: naming `argument`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    found = "a traced array" if isinstance(value, jax.core.Tracer) else repr(value)
    require(is_number and math.isfinite(value), argument, found, "a finite Python number, known while tracing")


def require_count(argument: str, value: Any) -> None:
    """Refuse a value that isn't a Python integer of at least 1.

    Raises:
      ValueError: naming `argument`.
    """
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_count, argument, repr(value), "a Python integer of at least 1")


def require_array(argument: str, array: Any, shape: tuple[int | None, ...], form: str) -> None:
    """Refuse an array that isn't int32 of `shape` (None fits any size); `form` is the shape in the contract's letters.

    Raises:
      ValueError: naming `argument`.
    """
    require(array is not None, argument, None, f"int32 {form}")
    require(array.ndim == len(shape), argument, f"rank {array.ndim}", f"rank {len(shape)}: {form}")
    require(array.dtype == jnp.int32, argument, array.dtype, "int32")
    fits = all(want in (None, size) for size, want in zip(array.shape, shape, strict=True))
    require(fits, argument, list(array.shape), f"{form} = {list(shape)}")


def validate_cache(cache: Any, argument: str, width: int, page_size: int, read_block: int) -> None:
    """Refuse a paged cache [N, page_size / packing, packing, align(width, 128)] that doesn't fit.

    Raises:
      ValueError: naming the argument.
    """
    require_count("page_size", page_size)
    require(cache.ndim == 4, argument, f"rank {cache.ndim}", "rank 4: [N, page_size/packing, packing, align(Dk, 128)]")
    require(cache.dtype in FLOATS, argument, cache.dtype, "bfloat16 or float32")
    pk = packing(cache.dtype)
    require(page_size % pk == 0, "page_size", page_size, f"a multiple of the packing {pk} of {cache.dtype}")
    want = (page_size // pk, pk, align(width, LANES))
    require(cache.shape[1:] == want, argument, list(cache.shape), f"[N, {want[0]}, {want[1]}, {want[2]}]")
    require(page_size % read_block == 0, "read_block", read_block, f"a divisor of page_size {page_size}")


def validate(
    q: Any,
    kv: Any,
    indices: Any,
    positions: Any,
    *,
    kv_lora_rank: int,
    read_block: int,
    block_units: int | None,
    sm_scale: float | None,
    page_table: Any,
    page_size: int | None,
    seq_len: int | None,
    q_seq_id: Any,
    seq_lens: Any,
    cu_kv_lens: Any,
    page_indices: Any,
) -> None:
    """Refuse what the contract of `sparse_mla_attention` forbids.

    Raises:
      ValueError: naming the argument, what was found and what is wanted.
    """
    require_number("sm_scale", sm_scale)
    require_count("block_units", block_units)
    require_count("read_block", read_block)
    require(q.ndim == 4, "q", f"rank {q.ndim}", "rank 4: [B, S, H, Dk]")
    require(q.dtype in FLOATS, "q", q.dtype, "bfloat16 or float32")
    require(kv.dtype == q.dtype, "kv", kv.dtype, f"q's dtype {q.dtype}")
    batch, queries, _, width = q.shape
    require_count("kv_lora_rank", kv_lora_rank)
    require(kv_lora_rank <= width, "kv_lora_rank", kv_lora_rank, f"at most Dk = {width}")
    require_array("indices", indices, (batch, queries, None), "[B, S, K]")
    require_array("positions", positions, (batch, queries), "[B, S]")
    ragged = {"q_seq_id": q_seq_id, "seq_lens": seq_lens, "cu_kv_lens": cu_kv_lens, "page_indices": page_indices}
    paged = {"page_table": page_table, "seq_len": seq_len}
    if any(array is not None for array in ragged.values()):
        _validate_ragged(batch, queries, **ragged)
        given = [name for name, value in paged.items() if value is not None]
        require(not given, given[0] if given else "", "given", "None: a ragged call has seq_lens and page_indices")
        validate_cache(kv, "kv", width, page_size, read_block)
    elif any(value is not None for value in (*paged.values(), page_size)):
        require_count("page_size", page_size)
        require_count("seq_len", seq_len)
        require_array("page_table", page_table, (batch, -(-seq_len // page_size)), "[B, ceil(seq_len / page_size)]")
        validate_cache(kv, "kv", width, page_size, read_block)
    else:
        require(kv.ndim == 3, "kv", f"rank {kv.ndim}", "rank 3 [B, T, Dk], or page_size and a paged cache")
        require(kv.shape[0] == batch, "kv", list(kv.shape), f"the batch of q, {batch}")
        require(kv.shape[2] == width, "kv", list(kv.shape), f"the width of q, {width}")


def _validate_ragged(batch: int, queries: int, q_seq_id: Any, seq_lens: Any, cu_kv_lens: Any, page_indices: Any) -> None:
    require(batch == 1, "q", f"B = {batch}", "B = 1 in a packed ragged call")
    require_array("q_seq_id", q_seq_id, (queries,), "[S]")
    require_array("seq_lens", seq_lens, (None,), "[n]")
    require_array("cu_kv_lens", cu_kv_lens, (seq_lens.shape[0] + 1,), "[n + 1]")
    require_array("page_indices", page_indices, (None,), "[sum of pages]")
