"""A step's batch as a call of a kernel: over the engine's pool and tables, or over each request's history laid out in
pages of its own, which is what the oracle is asked.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.dense_mla.case import DenseCase
from properties.serving.case import ServingCase, SparseServingCase, Step
from properties.serving.ledger import Span
from properties.sparse_prefill.case import PrefillCase

Arrays = dict[str, np.ndarray]

BLOCK_UNITS = 4
"""Units a step of `sparse_mla_attention`: speed only."""

_UNITS = 2**20
"""Stream of selections, a step's number added."""


@dataclass(frozen=True)
class Batch:
    """What a step runs."""

    case: ServingCase
    number: int
    """Of the step."""
    spans: tuple[Span, ...]

    @property
    def step(self) -> Step:
        """The step."""
        return self.case.steps[self.number]

    @property
    def q_lens(self) -> list[int]:
        """Tokens of each request."""
        return [span.last - span.first for span in self.spans]

    def call(self, index: Arrays, caches: Arrays) -> Inputs:
        """The call over `caches` with index arrays `index`."""
        arrays = self.case.batch(self.spans) | caches | index
        if not isinstance(self.case, SparseServingCase):
            return self.case.config.call(arrays)
        arrays["topk_pages"] = self._units()
        return self._attention(arrays) if self.step.action == "attend" else self.case.config.call(arrays)

    def over_histories(self, index: Arrays) -> Inputs:
        """The call in a pool where each history's pages follow one another.

        Of the engine's `index` only the dense kernel's ranges are used, which an engine may choose.
        """
        lengths = [len(span.history) for span in self.spans]
        counts = [-(-length // self.case.config.page_size) for length in lengths]
        config = dataclasses.replace(self.case.config, pool=sum(counts))
        pages = tuple(range(config.pool))
        if isinstance(self.case, SparseServingCase):
            idle, tokens = [0] * (config.sequences - len(self.spans)), config.tokens
            q_lens, kv_lens = tuple(self.q_lens + idle), tuple(lengths + idle)
            padding = ((-1,) * tokens, (False,) * tokens, self.case.values)
            placed = PrefillCase(config, q_lens, kv_lens, (), pages, *padding).metadata()
        else:
            ranges = tuple(index["distribution"].tolist())
            placed = DenseCase(config, ranges, tuple(self.q_lens), tuple(lengths), pages, self.case.values).metadata()
        return self.call(placed, self._histories(config, counts))

    def _histories(self, config: object, counts: list[int]) -> Arrays:
        """Caches with what stands in the pool before the step, or after it if nothing is written."""
        held = [len(span.history) if self.step.action == "attend" else span.first for span in self.spans]
        starts = np.concatenate([[0], np.cumsum(counts)]) * config.page_size
        slots = np.concatenate([start + np.arange(end) for start, end in zip(starts, held, strict=False)])
        numbers = [token for span, end in zip(self.spans, held, strict=True) for token in span.history[:end]]
        caches = {}
        for name, rows in self.case.parts(self.case.tokens.keys[numbers]).items():
            cache = np.zeros((config.pool * config.page_size, rows.shape[-1]), rows.dtype)
            cache[slots] = rows
            caches[name] = cache.reshape(config.shapes()[name][0])
        return caches

    def _units(self) -> np.ndarray:
        """int32 [T, K]: all units in a third of steps, else a random selection with padding; none for padded tokens."""
        config, count = self.case.config, sum(self.q_lens)
        selection = np.full((config.tokens, config.topk), -1, np.int32)
        if self.step.pick % 3 == 0:
            selection[:count] = np.arange(config.topk)
            return selection
        places = np.concatenate([np.arange(span.first, span.last) for span in self.spans])
        drawn = bits.choices(self.case.values.seed, _UNITS + self.number, (count, config.topk), 2**30)
        selection[:count] = drawn % (places // config.read_block + 2)[:, None] - 1
        return selection

    def _attention(self, arrays: Arrays) -> Inputs:
        """The call of sparse attention on the arrays of sparse prefill: nothing is written."""
        config = self.case.config
        query = np.concatenate([arrays["ql"], arrays["qpe"]], axis=-1)
        args = {"q": query[None], "kv": arrays["cache"], "indices": arrays["topk_pages"][None]}
        args["positions"] = arrays["positions"][None]
        owner = np.searchsorted(arrays["cu_q_lens"][1:], np.arange(config.tokens), side="right")
        named = {"q_seq_id": np.minimum(owner, config.sequences - 1).astype(np.int32)}
        named |= {name: arrays[name] for name in ("seq_lens", "cu_kv_lens", "page_indices")}
        options = {name: getattr(config, name) for name in ("kv_lora_rank", "read_block", "page_size", "sm_scale")}
        return Inputs("sparse_mla_attention", args, named, options | {"block_units": BLOCK_UNITS})
