"""What a sparse MLA case holds and the arrays that follow from it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from oracles.paging import align, packing
from properties import bits
from properties.case import Inputs, abstract_array
from properties.values import Values

JUNK_PAGES = (-1, 2**31 - 1, -(2**31), -7)
"""What stands in page-table entries that no listed unit uses."""


@dataclass(frozen=True)
class SparseConfig:
    """Everything static of a call of `sparse_mla_attention`: one compiled function a backend."""

    source: str
    """Where keys live: flat, paged (one table a batch row) or ragged (packed requests over one pool)."""
    dtype: str
    heads: int
    kv_lora_rank: int
    rope: int
    batch: int
    queries: int
    """Queries a batch row."""
    topk: int
    """Units listed a query."""
    read_block: int
    """Tokens a unit."""
    block_units: int
    tokens: int
    """Length of a flat row or of a paged sequence; the longest request of a ragged batch."""
    page_size: int
    """Tokens a page; 0 when flat."""
    pool: int
    """Physical pages; 0 when flat."""
    requests: int
    """Requests of a ragged batch; 0 otherwise."""
    sm_scale: float

    def __str__(self) -> str:
        place = "flat" if self.source == "flat" else f"{self.source}-ps{self.page_size}"
        size = f"h{self.heads}-l{self.kv_lora_rank}-r{self.rope}-b{self.batch}x{self.queries}-t{self.tokens}"
        return f"{place}-{self.dtype}-{size}-k{self.topk}-rb{self.read_block}-bu{self.block_units}"

    @property
    def width(self) -> int:
        """Columns of a query and of an unpadded key, Dk."""
        return self.kv_lora_rank + self.rope

    @property
    def pages_a_row(self) -> int:
        """Page-table columns of a sequence of `tokens` tokens."""
        return -(-self.tokens // self.page_size)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype name of every array of a call, in the contract's order."""
        query = (self.batch, self.queries)
        shapes = {"q": ((*query, self.heads, self.width), self.dtype)}
        if self.source == "flat":
            shapes["kv"] = ((self.batch, self.tokens, self.width), self.dtype)
        else:
            pk = packing(bits.DTYPES[self.dtype])
            shapes["kv"] = ((self.pool, self.page_size // pk, pk, align(self.width, 128)), self.dtype)
        shapes |= {"indices": ((*query, self.topk), "i32"), "positions": (query, "i32")}
        if self.source == "paged":
            shapes["page_table"] = ((self.batch, self.pages_a_row), "i32")
        if self.source == "ragged":
            shapes |= {"q_seq_id": ((self.queries,), "i32"), "seq_lens": ((self.requests,), "i32")}
            shapes |= {"cu_kv_lens": ((self.requests + 1,), "i32")}
            shapes |= {"page_indices": ((self.requests * self.pages_a_row,), "i32")}
        return shapes

    def abstract(self) -> Inputs:
        """See `Config`."""
        shapes = self.shapes().items()
        return self.call({name: abstract_array(shape, bits.DTYPES[dtype]) for name, (shape, dtype) in shapes})

    def call(self, arrays: dict[str, np.ndarray]) -> Inputs:
        """The call of the entry point on `arrays`, which have the names of `shapes`."""
        options = {"kv_lora_rank": self.kv_lora_rank, "read_block": self.read_block, "block_units": self.block_units}
        options["sm_scale"] = self.sm_scale
        if self.source != "flat":
            options["page_size"] = self.page_size
        if self.source == "paged":
            options["seq_len"] = self.tokens
        positional = ("q", "kv", "indices", "positions")
        by_keyword = {name: array for name, array in arrays.items() if name not in positional}
        return Inputs("sparse_mla_attention", {name: arrays[name] for name in positional}, by_keyword, options)


@dataclass(frozen=True)
class SparseCase:
    """One call: which units each query lists, where the pages lie, how long the requests are, and the numbers."""

    family: ClassVar[str] = "sparse_mla"
    kernel: ClassVar[str] = "sparse_mla"

    config: SparseConfig
    units: tuple[tuple[int, ...], ...]
    """[B*S][K] unit ids; negative is padding, too large names no token."""
    positions: tuple[int, ...]
    """[B*S] absolute position of each query."""
    pages: tuple[int, ...]
    """Physical pages in order of (row or request, logical page); empty when flat."""
    q_seq_id: tuple[int, ...]
    """[S] request of each query, ragged only."""
    seq_lens: tuple[int, ...]
    """[n] kv length of each request, ragged only."""
    values: Values

    def lengths(self) -> np.ndarray:
        """int64 [B*S]: the causal length of each query's sequence."""
        if self.config.source == "ragged":
            return np.asarray(self.seq_lens, np.int64)[list(self.q_seq_id)]
        return np.full(self.config.batch * self.config.queries, self.config.tokens, np.int64)

    def sequences(self) -> np.ndarray:
        """int64 [B*S]: which batch row or request each query reads."""
        if self.config.source == "ragged":
            return np.asarray(self.q_seq_id, np.int64)
        return np.repeat(np.arange(self.config.batch), self.config.queries)

    def page_offsets(self) -> np.ndarray:
        """int64 [rows or requests + 1]: where the pages of each sequence start in `pages`."""
        config = self.config
        if config.source == "ragged":
            counts = -(-np.asarray(self.seq_lens, np.int64) // config.page_size)
        else:
            counts = np.full(config.batch, config.pages_a_row)
        return np.concatenate([[0], np.cumsum(counts)])

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """Flat slot number of `tokens` int64 [B*S, n], each inside its query's sequence."""
        config, sequence = self.config, self.sequences()[:, None]
        if config.source == "flat":
            return sequence * config.tokens + tokens
        entry = self.page_offsets()[sequence] + tokens // config.page_size
        page = np.asarray((*self.pages, 0), np.int64)[entry]  # the 0 serves a last request that is empty
        return page * config.page_size + tokens % config.page_size

    def listed(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [B*S, K*RB] of every listed unit, and whether each lies inside its sequence."""
        rb = self.config.read_block
        units = np.asarray(self.units, np.int64)
        tokens = (units[:, :, None] * rb + np.arange(rb)).reshape(len(units), -1)
        return tokens, (tokens >= 0) & (tokens < self.lengths()[:, None])

    def inputs(self) -> Inputs:
        """The arrays; every slot that no query attends is poisoned, every table entry that no unit uses is junk."""
        config = self.config
        shapes = config.shapes()
        arrays = {"q": self._queries(shapes["q"][0]), "kv": self._cache(shapes["kv"][0])}
        arrays["indices"] = np.asarray(self.units, np.int32).reshape(shapes["indices"][0])
        arrays["positions"] = np.asarray(self.positions, np.int32).reshape(shapes["positions"][0])
        if config.source == "paged":
            arrays["page_table"] = self._table(shapes["page_table"][0])
        if config.source == "ragged":
            arrays["q_seq_id"] = np.asarray(self.q_seq_id, np.int32)
            arrays["seq_lens"] = np.asarray(self.seq_lens, np.int32)
            arrays["cu_kv_lens"] = (self.page_offsets() * config.page_size).astype(np.int32)
            arrays["page_indices"] = self._table(shapes["page_indices"][0])
        return config.call(arrays)

    def _queries(self, shape: tuple[int, ...]) -> np.ndarray:
        config = self.config
        rows = (config.batch * config.queries, config.heads)
        q = self.values.queries(rows, config.kv_lora_rank, config.rope, config.sm_scale)
        return q.astype(bits.DTYPES[config.dtype]).reshape(shape)

    def _cache(self, shape: tuple[int, ...]) -> np.ndarray:
        config = self.config
        slots = config.batch * config.tokens if config.source == "flat" else config.pool * config.page_size
        keys = self.values.keys(slots, config.kv_lora_rank, config.rope, config.sm_scale, self._needles())
        keys = keys.astype(bits.DTYPES[config.dtype])
        if self.values.poison != "finite":
            tokens, inside = self.listed()
            attended = inside & (tokens <= np.asarray(self.positions)[:, None])
            unattended = np.ones(slots, bool)
            unattended[self.slots(np.where(attended, tokens, 0))[attended]] = False
            keys[unattended] = self.values.unowned((np.count_nonzero(unattended), config.width), config.dtype)
        cache = np.zeros((slots, shape[-1]), keys.dtype)
        cache[:, : config.width] = keys
        return cache.reshape(shape)

    def _needles(self) -> np.ndarray:
        """Slots next to a causal bound, a length, a page edge or a listed unit's edge."""
        rb, length = self.config.read_block, self.lengths()[:, None]
        tokens, _ = self.listed()
        edges = [tokens[:, :: 3 * rb] - 1, tokens[:, rb - 1 :: 3 * rb] + 1, length - 1, length]
        edges.append(np.asarray(self.positions, np.int64)[:, None] + [0, 1])
        if self.config.page_size:
            edges.append(np.broadcast_to([self.config.page_size - 1, self.config.page_size], (len(length), 2)))
        edge = np.concatenate(edges, axis=1)
        inside = (edge >= 0) & (edge < length)
        return self.slots(np.where(inside, edge, 0))[inside]

    def _table(self, shape: tuple[int, ...]) -> np.ndarray:
        junk = np.resize(np.array(JUNK_PAGES, np.int32), shape).reshape(-1)
        tokens, inside = self.listed()
        used = (self.page_offsets()[self.sequences()][:, None] + tokens // self.config.page_size)[inside]
        junk[used] = np.asarray(self.pages, np.int32)[used]
        return junk.reshape(shape)
