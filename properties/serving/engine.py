"""The engine that drives the kernels: which pages a request's tokens go to, and what it tells the kernels of them.

It keeps a row of page table and a length for each slot, as servers do, and knows nothing of tokens' contents. The
model (ledger and contiguous histories) shares no code with it, so that a fault on either side of a kernel call shows.
"""

import numpy as np

from properties.serving.case import Step
from properties.serving.ledger import Sizes


class Engine:
    """Slots, page tables and free pages."""

    def __init__(self, config: Sizes) -> None:
        self._config = config
        self.table = np.full((config.sequences, config.pages_a_sequence), -1, np.int32)
        """[slots, W] physical pages; -1 where there is none."""
        self.lengths = np.zeros(config.sequences, np.int32)
        """[slots] tokens in the pool."""
        self.users = np.zeros(config.pool, np.int32)
        """[N] requests that own each page."""
        self.free = list(range(config.pool))
        self._slots: dict[int, int] = {}
        self._idle = list(range(config.sequences))

    def pages(self, request: int) -> list[int]:
        """Physical pages of a request, in order."""
        row = self.table[self._slots[request]]
        return row[row >= 0].tolist()

    def take(self, step: Step) -> list[int]:
        """Change tables as `step` says; returns the pages that it freed."""
        match step.action:
            case "admit":
                self._slots[step.requests[0]] = self._idle.pop()
            case "fork":
                self._fork(*step.requests)
            case "evict":
                return self._release(step.requests[0])
            case "finish":
                freed = self._release(step.requests[0])
                self._idle.append(self._slots.pop(step.requests[0]))
                return freed
            case "prefill" | "decode":
                for request, length in zip(step.requests, step.lengths, strict=True):
                    self._grow(request, length, step.pick)
        return []

    def _grow(self, request: int, tokens: int, pick: int) -> None:
        slot, ps = self._slots[request], self._config.page_size
        held, length = -(-self.lengths[slot] // ps), self.lengths[slot] + tokens
        for column in range(held, -(-length // ps)):
            page = self.free.pop(pick % len(self.free))
            self.users[page] = 1
            self.table[slot, column] = page
        self.lengths[slot] = length

    def _fork(self, parent: int, child: int) -> None:
        slot = self._slots[child] = self._idle.pop()
        full = self.lengths[self._slots[parent]] // self._config.page_size
        shared = self.table[self._slots[parent], :full]
        self.users[shared] += 1
        self.table[slot, :full] = shared
        self.lengths[slot] = full * self._config.page_size

    def _release(self, request: int) -> list[int]:
        slot, pages = self._slots[request], self.pages(request)
        self.users[pages] -= 1
        freed = [page for page in pages if self.users[page] == 0]
        self.free += freed
        self.free.sort()
        self.table[slot] = -1
        self.lengths[slot] = 0
        return freed

    def dense_metadata(self, step: Step) -> dict[str, np.ndarray]:
        """Index arrays of `mla_ragged_paged_attention` for a batch that the tables hold already."""
        config, slots = self._config, self._slots_of(step)
        count, decodes = len(slots), step.lengths.count(1)
        table = np.full((config.sequences, config.pages_a_sequence), -1, np.int32)
        table[:count] = self.table[slots]
        kv_lens = np.zeros(config.sequences, np.int32)
        kv_lens[:count] = self.lengths[slots]
        decodes = next((i for i, length in enumerate(step.lengths) if length != 1), count)
        chunks = decodes + step.pick % (count - decodes + 1)
        distribution = np.array([decodes, chunks, count], np.int32)
        cu_q_lens = _cumulative(step.lengths, config.sequences)
        arrays = {"kv_lens": kv_lens, "page_indices": table.reshape(-1)}
        return arrays | {"cu_q_lens": cu_q_lens, "distribution": distribution}

    def prefill_metadata(self, step: Step) -> dict[str, np.ndarray]:
        """Index arrays of `prefill_write_and_attend_ragged`, likewise; -1 is the slot of padded tokens."""
        config, slots = self._config, self._slots_of(step)
        loc, positions = np.full(config.tokens, -1, np.int32), np.zeros(config.tokens, np.int32)
        start = 0
        for slot, length in zip(slots, step.lengths, strict=True):
            place = np.arange(self.lengths[slot] - length, self.lengths[slot])
            page = self.table[slot, place // config.page_size]
            loc[start : start + length] = page * config.page_size + place % config.page_size
            positions[start : start + length] = place
            start += length
        pages = -(-self.lengths[slots] // config.page_size)
        packed = np.full(config.sequences * config.pages_a_sequence, -1, np.int32)
        packed[: pages.sum()] = np.concatenate([self.table[slot, :n] for slot, n in zip(slots, pages, strict=True)])
        seq_lens = np.zeros(config.sequences, np.int32)
        seq_lens[: len(slots)] = self.lengths[slots]
        cu_q_lens = _cumulative(step.lengths, config.sequences)
        cu_kv_lens = _cumulative(pages * config.page_size, config.sequences)
        arrays = {"positions": positions, "loc": loc, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
        return arrays | {"cu_kv_lens": cu_kv_lens, "page_indices": packed}

    def _slots_of(self, step: Step) -> list[int]:
        return [self._slots[request] for request in step.requests]


def _cumulative(lengths: np.ndarray | tuple[int, ...], slots: int) -> np.ndarray:
    """int32 [slots + 1]: where each of `lengths` starts, and the end for all slots behind."""
    ends = np.cumsum(lengths, dtype=np.int32)
    return np.concatenate([[0], ends, np.full(slots - len(ends), ends[-1])]).astype(np.int32)
