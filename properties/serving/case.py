"""What a serving case holds: the steps that an engine takes, and the contents of every token."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.dense_mla.case import DenseConfig
from properties.serving.ledger import Ledger, Span
from properties.sparse_prefill.case import PrefillConfig
from properties.values import Values

_PADDING, _POOL = 3, 8
"""Streams of padded rows, and of what the pool holds at first; a step's freed pages have streams behind it."""


@dataclass(frozen=True)
class Step:
    """One step of the engine. Requests are numbered as they are admitted or forked."""

    action: str
    """admit, prefill, decode, fork, finish, evict or attend."""
    requests: tuple[int, ...]
    """Those concerned, in batch order; the parent and its child for a fork."""
    lengths: tuple[int, ...] = ()
    """Tokens of each request of a batch."""
    pick: int = 0
    """Which free pages are taken, and whatever else the step leaves open."""

    def __str__(self) -> str:
        if self.action == "fork":
            return "fork r{} as r{}, sharing its full pages".format(*self.requests)
        named = [f"r{request}" for request in self.requests]
        if not self.lengths:
            return f"{self.action} {' '.join(named)}"
        many = (f"{name} +{length}" for name, length in zip(named, self.lengths, strict=True))
        return f"{self.action} {', '.join(many)} (pick {self.pick})"


@dataclass(frozen=True)
class ServingCase:
    """Steps over the dense kernel: a mixed batch a call, its two caches the pool."""

    family: ClassVar[str] = "serving"
    kernel: ClassVar[str] = "dense_mla"
    queries: ClassVar[tuple[str, str]] = ("ql_nope", "q_pe")
    """Arguments that hold a batch's queries, latent and rope."""
    rows: ClassVar[tuple[str, str]] = ("new_kv_c", "new_k_pe")
    """Arguments that hold its new keys, latent and rope."""
    caches: ClassVar[tuple[str, ...]] = ("cache_kv_c", "cache_k_pe")
    """Arguments that are the pool."""

    config: DenseConfig
    steps: tuple[Step, ...]
    values: Values

    def first(self, count: int) -> Self:
        """The case of the first `count` steps. Tokens are drawn in order, so theirs stay the same but for needles."""
        return dataclasses.replace(self, steps=self.steps[:count])

    @cached_property
    def tokens(self) -> "Tokens":
        """The contents of every token that the steps bring."""
        return Tokens.of(self)

    def pool(self) -> dict[str, np.ndarray]:
        """The caches that the engine starts with: no token owns any of it."""
        return self.unowned(_POOL)

    def freed(self, step: int) -> dict[str, np.ndarray]:
        """Caches full of what stands in pages that step number `step` frees."""
        return self.unowned(_POOL + 2 * (step + 1))

    def unowned(self, stream: int) -> dict[str, np.ndarray]:
        """The caches by name with nothing but poison."""
        shapes = self.config.shapes()
        return {name: self.values.unowned(*shapes[name], stream + i) for i, name in enumerate(self.caches)}

    def parts(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        """What each cache holds of `keys` [n, L + R], its zero padding included."""
        rank, shapes = self.config.kv_lora_rank, self.config.shapes()
        split = (keys,) if len(self.caches) == 1 else (keys[:, :rank], keys[:, rank:])
        wide = {name: shapes[name][0][-1] for name in self.caches}
        return {
            name: np.pad(part, ((0, 0), (0, wide[name] - part.shape[1])))
            for name, part in zip(wide, split, strict=True)
        }

    def batch(self, spans: tuple[Span, ...]) -> dict[str, np.ndarray]:
        """Queries and new keys of a batch by argument; keys behind it are poison, queries finite."""
        numbers = [number for span in spans for number in span.history[span.first :]]
        queries, keys, rank = self.tokens.queries[numbers], self.tokens.keys[numbers], self.config.kv_lora_rank
        finite = dataclasses.replace(self.values, poison="finite")
        arrays = self._padded(finite, self.queries, (queries[..., :rank], queries[..., rank:]))
        return arrays | self._padded(self.values, self.rows, (keys[:, :rank], keys[:, rank:]))

    def _padded(self, padding: Values, names: tuple[str, str], parts: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        arrays = {name: padding.unowned(*self.config.shapes()[name], _PADDING) for name in names}
        for name, rows in zip(names, parts, strict=True):
            arrays[name][: len(rows)] = rows
        return arrays

    def inputs(self) -> Inputs:
        """What the steps start from: the pool, every token's query and key, and the steps as numbers."""
        steps = [(len(x.requests), *x.requests, len(x.lengths), *x.lengths, x.pick) for x in self.steps]
        flat = np.array([number for step in steps for number in step], np.int64)
        arrays = self.pool() | {"queries": self.tokens.queries, "keys": self.tokens.keys, "steps": flat}
        return Inputs(self.config.abstract().entry, arrays, options={"actions": tuple(x.action for x in self.steps)})


@dataclass(frozen=True)
class SparseServingCase(ServingCase):
    """Steps over the sparse kernel: ragged prefill writes and attends, its one cache the pool."""

    family: ClassVar[str] = "serving_sparse"
    kernel: ClassVar[str] = "sparse_mla"
    queries: ClassVar[tuple[str, str]] = ("ql", "qpe")
    rows: ClassVar[tuple[str, str]] = ("kvc", "kpe")
    caches: ClassVar[tuple[str, ...]] = ("cache",)

    config: PrefillConfig


@dataclass(frozen=True)
class Tokens:
    """Every token of a case, numbered in the order in which requests first bring them."""

    queries: np.ndarray
    """q dtype [tokens, H, L + R]."""
    keys: np.ndarray
    """kv dtype [tokens, L + R]."""

    @classmethod
    def of(cls, case: ServingCase) -> Self:
        """Needles are the tokens beside the border of a chunk or of a page."""
        config, ledger, needles = case.config, Ledger(case.config), set()
        for step in case.steps:
            for span in ledger.take(step).spans:
                edges = {0, config.page_size, span.first, span.last}
                beside = {t + d for t in edges for d in (-1, 0)} & set(range(span.last))
                needles |= {span.history[t] for t in beside}
        size = (config.kv_lora_rank, config.rope, config.scale)
        queries = case.values.queries((ledger.known, config.heads), *size)
        keys = case.values.keys(ledger.known, *size, sorted(needles))
        q_dtype, kv_dtype = (config.shapes()[name][1] for name in (case.queries[0], case.rows[0]))
        return cls(queries.astype(bits.DTYPES[q_dtype]), keys.astype(bits.DTYPES[kv_dtype]))
