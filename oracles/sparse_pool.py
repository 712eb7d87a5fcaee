"""Where the keys of a sparse MLA call lie, and which tokens its queries attend."""

from dataclasses import dataclass
from typing import Self, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from oracles.paging import decode, slot_rows


class Source(TypedDict, total=False):
    """Where keys lie: nothing for flat keys, the first three for paged ones, `page_size` and the rest for packed
    ragged."""

    page_table: ArrayLike | None
    """[B, pages] int32."""
    page_size: int | None
    seq_len: int | None
    q_seq_id: ArrayLike | None
    """[S] int32, the request of each query."""
    seq_lens: ArrayLike | None
    """[n] int32, the length of each request."""
    cu_kv_lens: ArrayLike | None
    """[n + 1] int32, page-aligned: request r's pages start at page_indices[cu_kv_lens[r] // page_size]."""
    page_indices: ArrayLike | None


@dataclass(frozen=True)
class Pool:
    """All keys of a call by slot. Flat keys are pages as long as a batch row."""

    rows: np.ndarray
    """Bit patterns [slots, width]."""
    dtype: np.dtype
    page_size: int
    table: np.ndarray
    """int64, physical pages of all sequences."""
    starts: np.ndarray
    """int64 [B, S], where the pages of a query's sequence begin in `table`."""
    lengths: np.ndarray
    """int64 [B, S], tokens of a query's sequence."""

    @classmethod
    def of(cls, kv: np.ndarray, queries: tuple[int, int], source: Source) -> Self:
        """The pool of a call with `queries` = (B, S)."""
        rows, page_size = slot_rows(kv), source.get("page_size")
        by_row = np.broadcast_to(np.arange(queries[0])[:, None], queries)
        if page_size is None:
            length = np.full(queries, kv.shape[1])
            return cls(rows, kv.dtype, kv.shape[1], np.arange(kv.shape[0]), by_row, length)
        if source.get("q_seq_id") is None:
            table = np.asarray(source["page_table"], np.int64)
            length = np.full(queries, source["seq_len"])
            return cls(rows, kv.dtype, page_size, table.reshape(-1), by_row * table.shape[1], length)
        request = np.asarray(source["q_seq_id"])[None]
        starts = np.asarray(source["cu_kv_lens"], np.int64)[request] // page_size
        length = np.asarray(source["seq_lens"], np.int64)[request]
        return cls(rows, kv.dtype, page_size, np.asarray(source["page_indices"], np.int64), starts, length)

    def keys(self, tokens: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """float64 [B, S, n, width] keys of `tokens` [B, S, n]; zeros, and no slot read, where not attended."""
        tokens = np.where(attended, tokens, 0)
        entries = np.where(attended, self.starts[..., None] + tokens // self.page_size, 0)
        slots = np.where(attended, self.table[entries] * self.page_size + tokens % self.page_size, 0)
        patterns = self.rows[slots]
        patterns[~attended] = 0
        return decode(patterns, self.dtype)


def listed(
    indices: np.ndarray, positions: np.ndarray, lengths: np.ndarray, read_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """int64 tokens [B, S, K * read_block] of the listed units, and which of them are attended."""
    units = indices.astype(np.int64)[..., None]
    tokens = (units * read_block + np.arange(read_block)).reshape(*indices.shape[:2], -1)
    attended = (tokens >= 0) & (tokens <= positions[..., None]) & (tokens < lengths[..., None])
    return tokens, attended


def compact(tokens: np.ndarray, attended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both [B, S, n] cut to the largest number of attended tokens of any query, those attended in front."""
    longest = int(np.count_nonzero(attended, axis=-1).max(initial=0))
    order = np.argsort(~attended, axis=-1, kind="stable")[..., :longest]
    return np.take_along_axis(tokens, order, axis=-1), np.take_along_axis(attended, order, axis=-1)
