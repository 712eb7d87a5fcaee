"""Data races on one simulated buffer, exactly and cheaply.

Two accesses race when they overlap, one of them writes, and neither happens before the other. Happens-before comes from
the interpreter's vector clocks: every actor (the core, or one asynchronous copy) counts its own steps at its own
position of the clock, so an earlier access happened before a later one exactly when the later clock has reached the
earlier one's count. That is one comparison of two integers instead of one of two whole clocks, and an access that a
later one to the same box stands for is forgotten, so a buffer's history grows with the boxes that are used in it, not
with the accesses.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Interval = tuple[int, int, int]  # start, stop, step (positive): the positions range(start, stop, step)
Box = tuple[Interval, ...]  # one interval an axis; axes past the end are taken whole


class Access(NamedTuple):
    """One read or write: who, when in the actor's own steps, what it touched, and the source line that asked for it."""

    actor: int
    time: int
    box: Box
    source: Any


def to_box(indices: tuple[slice | int, ...]) -> Box:
    """The box that a tuple of integers and (start, stop, step) slices selects."""
    return tuple((i, i + 1, 1) if isinstance(i, int) else (i.start, i.stop, i.step or 1) for i in indices)


def is_empty(box: Box) -> bool:
    """Whether the box names no element at all."""
    return any(stop <= start for start, stop, _ in box)


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes that are not empty share an element."""
    return all(_meet(x, y) for x, y in zip(a, b, strict=False))


def _meet(a: Interval, b: Interval) -> bool:
    if a[0] >= b[1] or b[0] >= a[1]:
        return False
    return a[2] == b[2] == 1 or not set(range(*a)).isdisjoint(range(*b))


class BufferHistory:
    """The reads and writes of one buffer that a later access could still race with."""

    def __init__(self) -> None:
        self._reads: dict[Box, list[Access]] = {}
        self._writes: dict[Box, list[Access]] = {}

    def read(self, access: Access, clock: np.ndarray) -> Access | None:
        """Note a read at `clock` (int32 `[actors]`, the reader's own); returns an earlier write that it races with."""
        if is_empty(access.box):
            return None
        racing = next(_unordered(self._writes, access, clock), None)
        _remember(self._reads, access, clock)
        return racing

    def write(self, access: Access, clock: np.ndarray) -> Access | None:
        """Note a write at `clock`; returns an earlier read or write that it races with."""
        if is_empty(access.box):
            return None
        racing = next(_unordered(self._writes, access, clock), None) or next(
            _unordered(self._reads, access, clock), None
        )
        _remember(self._writes, access, clock)
        return racing


def _unordered(past: dict[Box, list[Access]], access: Access, clock: np.ndarray) -> Iterator[Access]:
    for box, earlier in past.items():
        unordered = [other for other in earlier if clock[other.actor] < other.time]
        if unordered and overlap(box, access.box):  # in this order: almost everything in the past is ordered
            yield from unordered


def _remember(past: dict[Box, list[Access]], access: Access, clock: np.ndarray) -> None:
    # Whatever is unordered with an access of the same kind, to the same box, that happened before this one is unordered
    # with this one too: the earlier one can go, and no race is lost.
    pending = [other for other in past.get(access.box, ()) if clock[other.actor] < other.time]
    past[access.box] = [*pending, access]
