"""Sparse MLA in float64: every query attends the tokens of the units that it lists.

A unit is `read_block` consecutive tokens of the query's sequence. Token t counts once for each time its unit is
listed, if t <= position and t < the sequence's length; a negative unit id is padding. The value of a key is its first
`kv_lora_rank` columns. Keys lie in one of three sources: flat [B, T, Dk]; paged, one page table for each batch row;
or packed ragged, where a query belongs to a request and a request to a run of `page_indices`.

Arguments are those of the kernels' contract, as anything NumPy can view; they are taken to be valid.
"""

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from oracles.paging import bits, decode, padded_row, slot_rows
from oracles.precision import Precision
from oracles.softmax import softmax_attention
from oracles.sparse_plain import attended_tokens, row, sparse_mla_attention_by_token
from oracles.sparse_pool import Pool, Source, compact, listed

__all__ = [
    "Source",
    "as_sparse_call",
    "attended_tokens",
    "prefill_write_and_attend",
    "prefill_write_and_attend_ragged",
    "row",
    "sparse_mla_attention",
    "sparse_mla_attention_by_token",
    "write_rows",
]


def sparse_mla_attention(
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    positions: ArrayLike,
    *,
    kv_lora_rank: int = 512,
    read_block: int = 1,
    sm_scale: float,
    precision: Precision | None = None,
    **source: Unpack[Source],
) -> tuple[np.ndarray, np.ndarray]:
    """Expected output and its error bound.

    Args:
      q: [B, S, H, Dk].
      kv: [B, T, Dk], or [N, page_size / packing, packing, align(Dk, 128)].
      indices: [B, S, K] unit ids.
      positions: [B, S].
      kv_lora_rank: columns of a value.
      read_block: tokens a unit.
      sm_scale: factor of the scores.
      precision: what a kernel may round; None for what the dtypes allow.
      source: see `Source`.

    Returns:
      (expected, bound): float64 [B, S, H, kv_lora_rank] each. A query that attends nothing is 0 with bound 0.
    """
    q, kv, positions = np.asarray(q), np.asarray(kv), np.asarray(positions)
    pool = Pool.of(kv, positions.shape, source)
    tokens, attended = listed(np.asarray(indices), positions, pool.lengths, read_block)
    tokens, attended = compact(tokens, attended)
    keys = pool.keys(tokens, attended)[..., : q.shape[-1]]
    precision = precision or Precision.of(q.dtype, kv.dtype, np.float32)
    values = keys[..., :kv_lora_rank]
    return softmax_attention(decode(bits(q), q.dtype), keys, values, attended, scale=sm_scale, precision=precision)


def write_rows(kvc: ArrayLike, kpe: ArrayLike, cache: ArrayLike, loc: ArrayLike) -> np.ndarray:
    """A copy of `cache` with each token's [latent | rope | zeros] row at its slot; dropped where `loc` is outside.

    Args:
      kvc: [T, L], cast to the cache's dtype.
      kpe: [T, R], likewise.
      cache: [N, page_size / packing, packing, align(L + R, 128)].
      loc: [T] slots.

    Returns:
      The cache in its own shape and dtype.
    """
    cache, loc = np.array(cache), np.asarray(loc, np.int64)
    rows = slot_rows(cache)
    new = np.concatenate([np.asarray(kvc), np.asarray(kpe)], axis=-1).astype(cache.dtype)
    inside = (loc >= 0) & (loc < rows.shape[0])
    rows[loc[inside]] = padded_row(bits(new), rows.shape[1])[inside]
    return rows.reshape(cache.shape).view(cache.dtype)


def as_sparse_call(
    ql: ArrayLike,
    qpe: ArrayLike,
    kvc: ArrayLike,
    kpe: ArrayLike,
    cache: ArrayLike,
    topk_pages: ArrayLike,
    positions: ArrayLike,
    loc: ArrayLike,
    *ragged: ArrayLike,
    kv_lora_rank: int,
    page_size: int,
    sm_scale: float,
    read_block: int | None = None,
) -> dict[str, Any]:
    """Arguments of `sparse_mla.sparse_mla_attention`, with B = 1, that attend after the write.

    `ragged` is nothing, or seq_lens, cu_q_lens, cu_kv_lens and page_indices; the rest is as in the entry points. One
    request from position 0 lies in the page of every page_size-th token. Queries behind the last request go by the
    last one.
    """
    written, loc = write_rows(kvc, kpe, cache, loc), np.asarray(loc, np.int64)
    if ragged:
        seq_lens, cu_q_lens, cu_kv_lens, page_indices = (np.asarray(x) for x in ragged)
        owner = np.searchsorted(cu_q_lens[1:], np.arange(len(loc)), side="right")
        source = Source(q_seq_id=np.minimum(owner, len(seq_lens) - 1), seq_lens=seq_lens)
        source |= Source(cu_kv_lens=cu_kv_lens, page_indices=page_indices)
    else:
        source = Source(page_table=loc[None, ::page_size] // page_size, seq_len=len(loc))
    return {
        "q": np.concatenate([np.asarray(ql), np.asarray(qpe)], axis=-1)[None],
        "kv": written,
        "indices": np.asarray(topk_pages)[None],
        "positions": np.asarray(positions)[None],
        "kv_lora_rank": kv_lora_rank,
        "read_block": read_block or page_size,
        "sm_scale": sm_scale,
        "page_size": page_size,
        **source,
    }


def prefill_write_and_attend(
    ql: ArrayLike,
    qpe: ArrayLike,
    kvc: ArrayLike,
    kpe: ArrayLike,
    cache: ArrayLike,
    topk_pages: ArrayLike,
    positions: ArrayLike,
    loc: ArrayLike,
    *,
    kv_lora_rank: int,
    page_size: int,
    sm_scale: float,
    read_block: int | None = None,
    precision: Precision | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expected result of writing and attending one request's tokens from position 0.

    Args:
      ql: [T, H, L] queries.
      qpe: [T, H, R].
      kvc: [T, L]; see `write_rows` for it, `kpe`, `cache` and `loc`.
      kpe: [T, R].
      cache: [N, page_size / packing, packing, align(L + R, 128)].
      topk_pages: [T, K] unit ids.
      positions: [T].
      loc: [T] slots.
      kv_lora_rank: columns of a value, L.
      page_size: tokens a page.
      sm_scale: factor of the scores.
      read_block: tokens a unit; None for a page.
      precision: what a kernel may round; None for what the dtypes allow.

    Returns:
      (expected, bound, cache): float64 [T, H, kv_lora_rank] twice, and the cache's bits as unsigned integers.
    """
    call = as_sparse_call(
        ql, qpe, kvc, kpe, cache, topk_pages, positions, loc,
        kv_lora_rank=kv_lora_rank, page_size=page_size, sm_scale=sm_scale, read_block=read_block,
    )  # fmt: skip
    return _attend(call, np.asarray(loc), len(np.asarray(loc)), precision)


def prefill_write_and_attend_ragged(
    ql: ArrayLike,
    qpe: ArrayLike,
    kvc: ArrayLike,
    kpe: ArrayLike,
    cache: ArrayLike,
    topk_pages: ArrayLike,
    positions: ArrayLike,
    loc: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    page_indices: ArrayLike,
    *,
    kv_lora_rank: int,
    page_size: int,
    sm_scale: float,
    read_block: int | None = None,
    precision: Precision | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expected result of writing and attending the tokens of many requests, each behind its cached prefix.

    Args and results are those of `prefill_write_and_attend`, and:
      seq_lens: [n] length of each request, its new tokens included.
      cu_q_lens: [n + 1] where each request's queries start.
      cu_kv_lens: [n + 1] page-aligned; request r's pages start at page_indices[cu_kv_lens[r] // page_size].
      page_indices: [pages of all requests].
    """
    call = as_sparse_call(
        ql, qpe, kvc, kpe, cache, topk_pages, positions, loc, seq_lens, cu_q_lens, cu_kv_lens, page_indices,
        kv_lora_rank=kv_lora_rank, page_size=page_size, sm_scale=sm_scale, read_block=read_block,
    )  # fmt: skip
    return _attend(call, np.asarray(loc), int(np.asarray(cu_q_lens)[-1]), precision)


def _attend(
    call: dict[str, Any], loc: np.ndarray, owned: int, precision: Precision | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What both entry points return; the first `owned` tokens belong to a request."""
    cache = call["kv"]
    padding = (loc < 0) | (loc >= cache.shape[0] * call["page_size"]) | (np.arange(len(loc)) >= owned)
    unspecified = padding & _attends_any(**call)[0]
    call = call | {"indices": np.where(padding[None, :, None], -1, call["indices"])}
    expected, bound = sparse_mla_attention(**call, precision=precision)
    return expected[0], np.where(unspecified[:, None, None], np.inf, bound[0]), bits(cache)


def _attends_any(
    kv: ArrayLike, indices: ArrayLike, positions: ArrayLike, *, read_block: int = 1, **source: Any
) -> np.ndarray:
    """bool [B, S]: whether a query attends anything; takes the arguments of `sparse_mla_attention`."""
    positions = np.asarray(positions)
    pool = Pool.of(np.asarray(kv), positions.shape, source)
    return listed(np.asarray(indices), positions, pool.lengths, read_block)[1].any(axis=-1)
