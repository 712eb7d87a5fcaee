"""Sparse MLA token by token: what the vectorised oracle is checked against, and what names a token in a failure
report."""

from collections import Counter
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from oracles.paging import Location, align, locate, packing
from oracles.row import Row
from oracles.sparse_pool import Source


def sparse_mla_attention_by_token(
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    positions: ArrayLike,
    *,
    kv_lora_rank: int = 512,
    read_block: int = 1,
    sm_scale: float,
    **source: Unpack[Source],
) -> np.ndarray:
    """The expected output alone, float64 [B, S, H, kv_lora_rank], one token at a time: the plain meaning, slowly."""
    q, kv, indices, positions = (np.asarray(x) for x in (q, kv, indices, positions))
    out = np.zeros((*q.shape[:3], kv_lora_rank))
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            keys = [
                _key(kv, where, b)[: q.shape[3]].astype(np.float64)
                for _, where in attended_tokens(b, s, kv, indices, positions, read_block=read_block, **source)
            ]
            for h in range(q.shape[2]):
                query = q[b, s, h].astype(np.float64)
                scores = [sm_scale * float(query @ key) for key in keys]
                weights = [float(np.exp(score - max(scores))) for score in scores]
                for weight, key in zip(weights, keys, strict=True):
                    out[b, s, h] += weight / sum(weights) * key[:kv_lora_rank]
    return out


def attended_tokens(
    b: int,
    s: int,
    kv: ArrayLike,
    indices: ArrayLike,
    positions: ArrayLike,
    *,
    read_block: int = 1,
    **source: Unpack[Source],
) -> list[tuple[int, int | Location]]:
    """Tokens that query (b, s) attends, in listed order, as often as they count: (token of the sequence, where it
    lies).

    A place is a row of kv[b] when flat, else page, row and lane.
    """
    kv, length = np.asarray(kv), _length(b, s, np.asarray(kv), source)
    found: list[tuple[int, int | Location]] = []
    for unit in np.asarray(indices)[b, s].tolist():
        for token in range(unit * read_block, unit * read_block + read_block):
            if unit >= 0 and token <= int(np.asarray(positions)[b, s]) and token < length:
                found.append((token, _place(b, s, token, kv, source)))
    return found


def row(
    b: int,
    s: int,
    q: ArrayLike,
    kv: ArrayLike,
    indices: ArrayLike,
    positions: ArrayLike,
    *,
    kv_lora_rank: int = 512,
    read_block: int = 1,
    sm_scale: float,
    **source: Unpack[Source],
) -> Row:
    """Query (b, s) with every key of its sequence, to the end of the last page, that the page table can find."""
    kv, query = np.asarray(kv), np.asarray(q)[b, s].astype(np.float64)
    attended = attended_tokens(b, s, kv, indices, positions, read_block=read_block, **source)
    end = align(_length(b, s, kv, source), source.get("page_size") or 1)
    places = {token: _place(b, s, token, kv, source) for token in range(end)}
    places = {token: x for token, x in places.items() if not isinstance(x, Location) or 0 <= x.page < kv.shape[0]}
    tokens, width = np.array(list(places), np.int64), query.shape[-1]
    attended_count = Counter(token for token, _ in attended)
    counts = np.array([attended_count[token] for token in places], np.int64)
    with np.errstate(invalid="ignore"):  # keys that nobody attends may be NaN
        keys = np.array([_key(kv, x, b)[:width] for x in places.values()]).astype(np.float64).reshape(-1, width)
        scores = sm_scale * (query @ keys.T)
    return Row(query, tokens, list(places.values()), keys, keys[:, :kv_lora_rank], scores, counts)


def _length(b: int, s: int, kv: np.ndarray, source: Source) -> int:
    if source.get("page_size") is None:
        return kv.shape[1]
    if source.get("q_seq_id") is None:
        return int(source["seq_len"])
    return int(np.asarray(source["seq_lens"])[np.asarray(source["q_seq_id"])[s]])


def _place(b: int, s: int, token: int, kv: np.ndarray, source: Source) -> int | Location:
    page_size = source.get("page_size")
    if page_size is None:
        return token
    if source.get("q_seq_id") is None:
        page = np.asarray(source["page_table"])[b, token // page_size]
    else:
        start = int(np.asarray(source["cu_kv_lens"])[np.asarray(source["q_seq_id"])[s]]) // page_size
        page = np.asarray(source["page_indices"])[start + token // page_size]
    return locate(int(page) * page_size + token % page_size, page_size, packing(kv.dtype))


def _key(kv: np.ndarray, where: int | Location, b: int) -> np.ndarray:
    return kv[where] if isinstance(where, Location) else kv[b, where]
