"""What a dense MLA case holds and the arrays that follow from it."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from oracles.paging import align, packing
from properties import bits
from properties.case import Inputs, abstract_array
from properties.values import Values

ARRAYS = ("ql_nope", "q_pe", "new_kv_c", "new_k_pe", "cache_kv_c", "cache_k_pe")
METADATA = ("kv_lens", "page_indices", "cu_q_lens", "distribution")

JUNK = (-1, 2**31 - 1, -(2**31), 7, 1, 0)
"""What stands, from a drawn start on, in metadata of inactive sequences and in page-table columns past the last used
page: what no length or page can be, and what one might be.
"""

_OLD = 1
"""Stream of what written slots held before."""


@dataclass(frozen=True)
class DenseConfig:
    """Everything static of a call of `mla_ragged_paged_attention`: one compiled function a backend."""

    q_dtype: str
    kv_dtype: str
    heads: int
    kv_lora_rank: int
    rope: int
    tokens: int
    """Query token slots, T."""
    sequences: int
    """Sequence slots, S."""
    page_size: int
    pages_a_sequence: int
    """Page-table columns, W."""
    pool: int
    """Physical pages, N."""
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    """None leaves the default, which hides a masked key altogether."""
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    chunk_prefill_size: int | None
    num_kv_pages_per_block: int
    num_queries_per_block: int

    def __str__(self) -> str:
        size = f"h{self.heads}-l{self.kv_lora_rank}-r{self.rope}-t{self.tokens}-s{self.sequences}"
        block = f"blk{self.num_queries_per_block}q{self.num_kv_pages_per_block}p"
        pages = f"ps{self.page_size}x{self.pages_a_sequence}-{block}"
        extra = {"w": self.sliding_window, "cap": self.soft_cap, "mask": self.mask_value, "ch": self.chunk_prefill_size}
        extra |= {"qs": self.q_scale, "ks": self.k_scale, "vs": self.v_scale}
        given = "".join(f"-{name}{value:g}" for name, value in extra.items() if value is not None)
        return f"{self.q_dtype}-{self.kv_dtype}-{size}-{pages}{given}"

    @property
    def scale(self) -> float:
        """All factors of a score together."""
        return self.sm_scale * (self.q_scale or 1.0) * (self.k_scale or 1.0)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence's page table can hold."""
        return self.page_size * self.pages_a_sequence

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype name of every array of a call, in the contract's order."""
        pk = packing(bits.DTYPES[self.kv_dtype])
        page = (self.pool, self.page_size // pk, pk)
        widths = {"c": self.kv_lora_rank, "pe": self.rope}
        return {
            "ql_nope": ((self.tokens, self.heads, widths["c"]), self.q_dtype),
            "q_pe": ((self.tokens, self.heads, widths["pe"]), self.q_dtype),
            "new_kv_c": ((self.tokens, widths["c"]), self.kv_dtype),
            "new_k_pe": ((self.tokens, widths["pe"]), self.kv_dtype),
            "cache_kv_c": ((*page, align(widths["c"], 128)), self.kv_dtype),
            "cache_k_pe": ((*page, align(widths["pe"], 128)), self.kv_dtype),
            "kv_lens": ((self.sequences,), "i32"),
            "page_indices": ((self.sequences * self.pages_a_sequence,), "i32"),
            "cu_q_lens": ((self.sequences + 1,), "i32"),
            "distribution": ((3,), "i32"),
        }

    def abstract(self) -> Inputs:
        """See `Config`."""
        shapes = self.shapes().items()
        return self.call({name: abstract_array(shape, bits.DTYPES[dtype]) for name, (shape, dtype) in shapes})

    def call(self, arrays: dict[str, np.ndarray]) -> Inputs:
        """The call of the entry point on `arrays`, which have the names of `shapes`."""
        named = ("sm_scale", "sliding_window", "soft_cap", "mask_value", "q_scale", "k_scale", "v_scale")
        named += ("chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block")
        options = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return Inputs("mla_ragged_paged_attention", arrays, options=options, donated=("cache_kv_c", "cache_k_pe"))


@dataclass(frozen=True)
class DenseCase:
    """One ragged batch: which sequences decode, prefill or mix, their lengths, where pages lie, and the numbers."""

    family: ClassVar[str] = "dense_mla"
    kernel: ClassVar[str] = "dense_mla"

    config: DenseConfig
    distribution: tuple[int, ...]
    """(i, j, n): sequences [0, i) decode, [i, j) prefill a chunk, [j, n) mix."""
    q_lens: tuple[int, ...]
    """[n] new tokens of each active sequence."""
    kv_lens: tuple[int, ...]
    """[n] tokens of each active sequence, new ones included."""
    pages: tuple[int, ...]
    """Physical pages in order of (sequence, logical page), ceil(kv_len / page_size) each."""
    values: Values

    @property
    def active(self) -> int:
        """Active sequences, n."""
        return self.distribution[2]

    def cu_q_lens(self) -> np.ndarray:
        """int64 [n + 1]: where each sequence's queries start."""
        return np.concatenate([[0], np.cumsum(self.q_lens, dtype=np.int64)])

    @cached_property
    def table(self) -> np.ndarray:
        """int64 [n, W] physical pages, -1 past the last used one."""
        table = np.full((self.active, self.config.pages_a_sequence), -1, np.int64)
        start = 0
        for sequence, kv_len in enumerate(self.kv_lens):
            used = -(-kv_len // self.config.page_size)
            table[sequence, :used] = self.pages[start : start + used]
            start += used
        return table

    def slots(self, sequence: int, tokens: np.ndarray) -> np.ndarray:
        """Flat slot numbers of `tokens` of one sequence."""
        ps = self.config.page_size
        return self.table[sequence][tokens // ps] * ps + tokens % ps

    def written(self) -> np.ndarray:
        """int64 [cu_q_lens[n]]: the slot that each new token is written to."""
        return self._slots_of((kv - q, kv) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))

    def owned(self) -> np.ndarray:
        """int64: every slot that holds a token of an active sequence."""
        return self._slots_of((0, kv) for kv in self.kv_lens)

    def _slots_of(self, spans: Iterable[tuple[int, int]]) -> np.ndarray:
        """The slots of tokens [first, end) of each active sequence in turn."""
        slots = (self.slots(sequence, np.arange(*span)) for sequence, span in enumerate(spans))
        return np.concatenate([np.zeros(0, np.int64), *slots])

    def inputs(self) -> Inputs:
        """The arrays; everything that no active sequence owns is poisoned, inactive metadata is junk."""
        config, count = self.config, len(self.written())
        keys, written = self._keys(), self.written()
        new = self._unowned((config.tokens, config.kv_lora_rank + config.rope), stream=2)
        new[:count] = keys[written]
        q = self._queries(count)
        arrays = {"ql_nope": q[..., : config.kv_lora_rank], "q_pe": q[..., config.kv_lora_rank :]}
        arrays |= {"new_kv_c": new[:, : config.kv_lora_rank], "new_k_pe": new[:, config.kv_lora_rank :]}
        arrays |= self._caches(keys)
        arrays |= self.metadata()
        return config.call({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def _unowned(self, shape: tuple[int, ...], stream: int) -> np.ndarray:
        return self.values.unowned(shape, self.config.kv_dtype, stream)

    def _keys(self) -> np.ndarray:
        """kv dtype [N * page_size, L + R]: the key of every slot once the new tokens are written."""
        config = self.config
        slots = config.pool * config.page_size
        keys = self.values.keys(slots, config.kv_lora_rank, config.rope, config.scale, self._needles())
        return keys.astype(bits.DTYPES[config.kv_dtype])

    def _queries(self, count: int) -> np.ndarray:
        """q dtype [T, H, L + R]; rows that belong to no sequence are poisoned."""
        config = self.config
        q = self.values.queries((config.tokens, config.heads), config.kv_lora_rank, config.rope, config.scale)
        q = q.astype(bits.DTYPES[config.q_dtype])
        q[count:] = self.values.unowned(q[count:].shape, config.q_dtype, stream=3)
        return q

    def _caches(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Both caches before the call: history where it is owned, something else in every other slot and column."""
        config, history = self.config, np.setdiff1d(self.owned(), self.written())
        shapes = config.shapes()
        old = {"cache_kv_c": keys[history, : config.kv_lora_rank], "cache_k_pe": keys[history, config.kv_lora_rank :]}
        caches = {}
        for stream, (name, rows) in enumerate(old.items(), start=4):
            shape = shapes[name][0]
            cache = self._unowned((config.pool * config.page_size, shape[-1]), stream)
            cache[history] = 0
            cache[history, : rows.shape[1]] = rows
            caches[name] = cache.reshape(shape)
        return caches

    def metadata(self) -> dict[str, np.ndarray]:
        """The four index arrays by name; what belongs to no active sequence or used page is junk."""
        config, active = self.config, self.active
        page_indices = self._junk((config.sequences, config.pages_a_sequence))
        page_indices[:active] = np.where(self.table >= 0, self.table, page_indices[:active])
        kv_lens, cu_q_lens = self._junk((config.sequences,)), self._junk((config.sequences + 1,))
        kv_lens[:active] = self.kv_lens
        cu_q_lens[: active + 1] = self.cu_q_lens()
        distribution = np.array(self.distribution, np.int32)
        return dict(zip(METADATA, (kv_lens, page_indices.reshape(-1), cu_q_lens, distribution), strict=True))

    def part(
        self, taken: Sequence[tuple[int, int, int]], distribution: tuple[int, int, int]
    ) -> tuple[Self, np.ndarray]:
        """The case of some sequences in some order, each (sequence, first, last) with new tokens [first, last) only and
        what stands before them; and int64 [tokens], the rows of this case that its queries are.
        """
        rows, q_lens, kv_lens, pages = [np.zeros(0, np.int64)], [], [], []
        for sequence, first, last in taken:
            kv_len = self.kv_lens[sequence] - self.q_lens[sequence] + last
            rows.append(self.cu_q_lens()[sequence] + np.arange(first, last))
            q_lens.append(last - first)
            kv_lens.append(kv_len)
            pages += self.table[sequence, : -(-kv_len // self.config.page_size)].tolist()
        changed = {"q_lens": tuple(q_lens), "kv_lens": tuple(kv_lens), "pages": tuple(pages)}
        return dataclasses.replace(self, distribution=distribution, **changed), np.concatenate(rows)

    def _needles(self) -> np.ndarray:
        """Slots next to a causal bound, a window's start, a page edge, a block edge or a sequence's end."""
        config = self.config
        block = config.page_size * config.num_kv_pages_per_block
        found = [np.zeros(0, np.int64)]
        for sequence, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            first, last = kv_len - q_len, kv_len - 1
            edges = {0, first, last, config.page_size, block, last // block * block}
            if config.sliding_window:
                edges |= {first - config.sliding_window + 1, last - config.sliding_window + 1}
            tokens = np.array(sorted({t + d for t in edges for d in (-1, 0, 1) if 0 <= t + d < kv_len}), np.int64)
            found.append(self.slots(sequence, tokens))
        return np.concatenate(found)

    def _junk(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(np.roll(np.array(JUNK, np.int32), self.values.seed % len(JUNK)), shape)
