"""What a sparse prefill case holds and the arrays that follow from it."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from oracles.paging import align, packing
from properties import bits
from properties.case import Inputs, abstract_array
from properties.values import Values

JUNK_PAGES = (-1, 2**31 - 1, -(2**31), -7)
"""What stands in page-table entries behind the last request's pages."""

RAGGED = ("seq_lens", "cu_q_lens", "cu_kv_lens", "page_indices")
"""Arrays that only the ragged form takes."""

_OLD, _PADDING = 1, 2
"""Streams of what unowned slots hold, and of what padded tokens bring."""


@dataclass(frozen=True)
class PrefillConfig:
    """Everything static of a call of either prefill form: one compiled function a backend."""

    ragged: bool
    """Many requests behind cached prefixes; else one request from position 0."""
    dtype: str
    heads: int
    kv_lora_rank: int
    rope: int
    tokens: int
    """New token slots, T."""
    topk: int
    """Units listed a query."""
    read_block: int
    """Tokens a unit."""
    page_size: int
    pages_a_sequence: int
    """Pages that a request may fill."""
    pool: int
    """Physical pages, N."""
    sequences: int
    """Requests; 1 unless ragged."""
    sm_scale: float

    def __str__(self) -> str:
        form = f"ragged{self.sequences}" if self.ragged else "single"
        size = f"h{self.heads}-l{self.kv_lora_rank}-r{self.rope}-t{self.tokens}"
        return f"{form}-{self.dtype}-{size}-k{self.topk}-rb{self.read_block}-ps{self.page_size}x{self.pages_a_sequence}"

    @property
    def entry(self) -> str:
        """The contract's name of this form."""
        return "prefill_write_and_attend_ragged" if self.ragged else "prefill_write_and_attend"

    @property
    def scale(self) -> float:
        """Factor of a score."""
        return self.sm_scale

    @property
    def width(self) -> int:
        """Columns of a key before its zero padding."""
        return self.kv_lora_rank + self.rope

    @property
    def slots(self) -> int:
        """Rows of the cache."""
        return self.pool * self.page_size

    @property
    def capacity(self) -> int:
        """Tokens of the longest request."""
        return self.page_size * self.pages_a_sequence if self.ragged else self.tokens

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype name of every array of a call, in the contract's order."""
        pk = packing(bits.DTYPES[self.dtype])
        shapes = {
            "ql": ((self.tokens, self.heads, self.kv_lora_rank), self.dtype),
            "qpe": ((self.tokens, self.heads, self.rope), self.dtype),
            "kvc": ((self.tokens, self.kv_lora_rank), self.dtype),
            "kpe": ((self.tokens, self.rope), self.dtype),
            "cache": ((self.pool, self.page_size // pk, pk, align(self.width, 128)), self.dtype),
            "topk_pages": ((self.tokens, self.topk), "i32"),
            "positions": ((self.tokens,), "i32"),
            "loc": ((self.tokens,), "i32"),
        }
        if self.ragged:
            shapes |= {"seq_lens": ((self.sequences,), "i32"), "cu_q_lens": ((self.sequences + 1,), "i32")}
            shapes |= {"cu_kv_lens": ((self.sequences + 1,), "i32")}
            shapes |= {"page_indices": ((self.sequences * self.pages_a_sequence,), "i32")}
        return shapes

    def abstract(self) -> Inputs:
        """See `Config`."""
        shapes = self.shapes().items()
        return self.call({name: abstract_array(shape, bits.DTYPES[dtype]) for name, (shape, dtype) in shapes})

    def call(self, arrays: dict[str, np.ndarray]) -> Inputs:
        """The call of the entry point on `arrays`, which have the names of `shapes`."""
        options = {"kv_lora_rank": self.kv_lora_rank, "page_size": self.page_size, "sm_scale": self.sm_scale}
        if self.read_block != self.page_size:  # a page is the default
            options["read_block"] = self.read_block
        return Inputs(self.entry, {name: arrays[name] for name in self.shapes()}, options=options)


@dataclass(frozen=True)
class PrefillCase:
    """One call: each request's new tokens behind its cached prefix, what they list, where pages lie, and the numbers.

    Tokens behind the last request's are padding. A request's token may have its write dropped, as where a prefix cache
    holds its row already; others then attend the row that is there.
    """

    family: ClassVar[str] = "sparse_prefill"
    kernel: ClassVar[str] = "sparse_mla"

    config: PrefillConfig
    q_lens: tuple[int, ...]
    """[n] new tokens of each request."""
    kv_lens: tuple[int, ...]
    """[n] tokens of each request, new ones included."""
    units: tuple[tuple[int, ...], ...]
    """[T][K] unit ids of each token's request; negative is padding, too large names no token."""
    pages: tuple[int, ...]
    """Physical pages in order of (request, logical page), ceil(kv_len / page_size) each."""
    outside: tuple[int, ...]
    """[T] slot outside the cache to which a token goes if it is padding or its write is dropped."""
    dropped: tuple[bool, ...]
    """[T] whether a request's token keeps what its slot holds; never in the single-sequence form."""
    values: Values

    @cached_property
    def cu_q_lens(self) -> np.ndarray:
        """int64 [n + 1]: where each request's tokens start."""
        return np.concatenate([[0], np.cumsum(self.q_lens, dtype=np.int64)])

    @property
    def owned(self) -> int:
        """Tokens that belong to a request."""
        return int(self.cu_q_lens[-1])

    def sequences(self) -> np.ndarray:
        """int64 [owned]: the request of each token."""
        return np.repeat(np.arange(len(self.q_lens)), self.q_lens)

    def positions(self) -> np.ndarray:
        """int64 [owned]: the absolute position of each token."""
        first = np.asarray(self.kv_lens, np.int64) - np.asarray(self.q_lens, np.int64)
        return (first - self.cu_q_lens[:-1])[self.sequences()] + np.arange(self.owned)

    def page_offsets(self) -> np.ndarray:
        """int64 [n + 1]: where each request's pages start in `pages`."""
        counts = -(-np.asarray(self.kv_lens, np.int64) // self.config.page_size)
        return np.concatenate([[0], np.cumsum(counts)])

    def slots(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Flat slot numbers of `tokens` of `sequences`, of shapes that go together."""
        ps = self.config.page_size
        entry = self.page_offsets()[sequences] + tokens // ps
        return np.asarray((*self.pages, 0), np.int64)[entry] * ps + tokens % ps  # the 0 serves an empty last request

    def targets(self) -> np.ndarray:
        """int64 [owned]: the slot of each token, dropped or not."""
        return self.slots(self.sequences(), self.positions())

    def attended(self) -> np.ndarray:
        """int64: the slots that some token attends, dropped ones' own lists left out."""
        rb, sequence, position = self.config.read_block, self.sequences()[:, None], self.positions()[:, None]
        units = np.asarray(self.units, np.int64)[: self.owned]
        tokens = (units[:, :, None] * rb + np.arange(rb)).reshape(self.owned, self.config.topk * rb)
        seen = (tokens >= 0) & (tokens <= position) & self._kept()[:, None]
        return np.unique(self.slots(np.broadcast_to(sequence, seen.shape)[seen], tokens[seen]))

    def inputs(self) -> Inputs:
        """The arrays; slots that no token attends hold poison before the call, and padded tokens bring nothing else."""
        config, count, rank = self.config, self.owned, self.config.kv_lora_rank
        keys, targets = self._keys(), self.targets()
        new = self.values.unowned((config.tokens, config.width), config.dtype, _PADDING)
        new[:count] = keys[targets]
        q = self.values.queries((config.tokens, config.heads), rank, config.rope, config.scale)
        q = q.astype(bits.DTYPES[config.dtype])
        arrays = {"ql": q[..., :rank], "qpe": q[..., rank:], "kvc": new[:, :rank], "kpe": new[:, rank:]}
        arrays["cache"] = self._cache(keys, targets[self._kept()])
        arrays["topk_pages"] = np.asarray(self.units, np.int32)
        arrays |= self.metadata()
        return config.call({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def metadata(self) -> dict[str, np.ndarray]:
        """The index arrays by name, lists of units left out; what belongs to no request is junk."""
        config, count = self.config, self.owned
        loc, kept = np.asarray(self.outside, np.int64), self._kept()
        loc[:count][kept] = self.targets()[kept]
        positions = np.resize(np.array((2**31 - 1, -1, 0, -(2**31)), np.int64), config.tokens)
        positions[:count] = self.positions()
        arrays = {"positions": positions, "loc": loc}
        if config.ragged:
            table = np.resize(np.array(JUNK_PAGES, np.int64), config.shapes()["page_indices"][0])
            table[: len(self.pages)] = self.pages
            kv_offsets = self.page_offsets() * config.page_size
            ragged = (np.asarray(self.kv_lens), self.cu_q_lens, kv_offsets, table)
            arrays |= dict(zip(RAGGED, ragged, strict=True))
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def _kept(self) -> np.ndarray:
        """bool [owned]: which of the requests' tokens are written."""
        return ~np.asarray(self.dropped, bool)[: self.owned]

    def _keys(self) -> np.ndarray:
        """dtype [slots, L + R]: the key of every slot once the new rows are written."""
        config = self.config
        keys = self.values.keys(config.slots, config.kv_lora_rank, config.rope, config.scale, self._needles())
        return keys.astype(bits.DTYPES[config.dtype])

    def _cache(self, keys: np.ndarray, written: np.ndarray) -> np.ndarray:
        """The cache before the call: attended history, and something else in every other slot and column."""
        config = self.config
        shape = config.shapes()["cache"][0]
        cache = self.values.unowned((config.slots, shape[-1]), config.dtype, _OLD)
        history = np.setdiff1d(self.attended(), written)
        cache[history] = 0
        cache[history, : config.width] = keys[history]
        return cache.reshape(shape)

    def _needles(self) -> np.ndarray:
        """Slots next to a request's start, its first new token, its end, or a page's edge."""
        found = [np.zeros(0, np.int64)]
        for sequence, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            edges = {0, kv_len - q_len, kv_len - 1, self.config.page_size, self.config.read_block}
            tokens = np.array(sorted({t + d for t in edges for d in (-1, 0, 1) if 0 <= t + d < kv_len}), np.int64)
            found.append(self.slots(np.full(len(tokens), sequence), tokens))
        return np.concatenate(found)
