"""The sequences of a dense MLA call: which rows are theirs, which positions those are, and in which slots their keys
lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Sequence:
    """An active sequence with at least one query."""

    start: int
    """First row of its queries."""
    q_len: int
    kv_len: int
    pages: np.ndarray
    """int64 [W] physical pages; those past the last used one may be anything."""
    page_size: int

    @property
    def rows(self) -> slice:
        """Rows of its queries."""
        return slice(self.start, self.start + self.q_len)

    @property
    def positions(self) -> np.ndarray:
        """int64 [q_len], absolute positions of its queries."""
        return np.arange(self.kv_len - self.q_len, self.kv_len)

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """int64, physical slot of each of `tokens`."""
        return self.pages[tokens // self.page_size] * self.page_size + tokens % self.page_size


@dataclass(frozen=True)
class Batch:
    """Metadata of a call; whatever belongs to inactive sequences is not read."""

    kv_lens: np.ndarray
    table: np.ndarray
    """int64 [S, W]."""
    cu_q_lens: np.ndarray
    active: int
    page_size: int

    @classmethod
    def of(
        cls,
        cache: np.ndarray,
        kv_lens: ArrayLike,
        page_indices: ArrayLike,
        cu_q_lens: ArrayLike,
        distribution: ArrayLike,
    ) -> Self:
        """The batch over `cache` [N, page_size / packing, packing, width]; the rest is as in the kernel's contract."""
        kv_lens = np.asarray(kv_lens, np.int64)
        table = np.asarray(page_indices, np.int64).reshape(len(kv_lens), -1)
        return cls(
            kv_lens,
            table,
            np.asarray(cu_q_lens, np.int64),
            int(np.asarray(distribution)[2]),
            cache.shape[1] * cache.shape[2],
        )

    @property
    def rows(self) -> int:
        """Rows of the output that belong to a sequence; those behind are unspecified."""
        return int(self.cu_q_lens[self.active])

    def sequences(self) -> Iterator[Sequence]:
        """The active sequences that have queries."""
        for s in range(self.active):
            start, end = (int(x) for x in self.cu_q_lens[s : s + 2])
            if end > start:
                yield Sequence(start, end - start, int(self.kv_lens[s]), self.table[s], self.page_size)
