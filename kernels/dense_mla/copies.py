"""Asynchronous copies between HBM and double buffers in VMEM.

Every copy has a static size, since the HLO interpreter takes no other, and is whole tiles of both sides: a page of
keys, or all heads of one token. A loop of dynamic length starts or awaits as many of them as a block has.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.dense_mla.plan import Plan
from kernels.dense_mla.schedule import QueryBlock, Scalar, Schedule

Ref = Any


def _start_each(count: Scalar, copies: Callable[[Scalar], Iterable[Any]]) -> None:
    """Start the copies of items 0 up to `count`."""

    def start(i: Scalar, _: None) -> None:
        for copy in copies(i):
            copy.start()

    jax.lax.fori_loop(0, count, start, None)


def _wait_each(count: Scalar, copies: Callable[[Scalar], Iterable[Any]]) -> None:
    """Wait for the copies of items 0 up to `count`."""

    def wait(i: Scalar, _: None) -> None:
        for copy in copies(i):
            copy.wait()

    jax.lax.fori_loop(0, count, wait, None)


class QueryCopies:
    """Queries of one block at a time: latent and rope columns side by side in `buffer` [2, queries, H, width]."""

    def __init__(self, plan: Plan, latent: Ref, rope: Ref, buffer: Ref, semaphores: Ref) -> None:
        self._latent, self._rope, self._split = latent, rope, plan.latent_width
        self._buffer, self._semaphores = buffer, semaphores

    def start(self, block: QueryBlock, slot: Scalar) -> None:
        """Start fetching the block's queries."""
        _start_each(block.num_queries, lambda i: self._copies(block, slot, i))

    def wait(self, block: QueryBlock, slot: Scalar) -> None:
        """Wait for the block's queries."""
        _wait_each(block.num_queries, lambda i: self._copies(block, slot, i))

    def _copies(self, block: QueryBlock, slot: Scalar, i: Scalar) -> list[Any]:
        token, place, semaphore = block.first_token + i, self._buffer.at[slot, i], self._semaphores.at[slot]
        return [
            pltpu.make_async_copy(self._latent.at[token], place.at[:, : self._split], semaphore),
            pltpu.make_async_copy(self._rope.at[token], place.at[:, self._split :], semaphore),
        ]


class KeyCopies:
    """Keys of one block at a time: latent and rope columns side by side in `buffer` [2, pages, ..., width]."""

    def __init__(self, plan: Plan, schedule: Schedule, latent: Ref, rope: Ref, buffer: Ref, semaphores: Ref) -> None:
        self._plan, self._schedule = plan, schedule
        self._latent, self._rope, self._split = latent, rope, plan.latent_width
        self._buffer, self._semaphores = buffer, semaphores

    def start(self, block: QueryBlock, index: Scalar, slot: Scalar) -> None:
        """Start fetching the pages of key block `index` of a query block."""
        first = block.first_page + index * self._plan.pages_per_block
        page = self._schedule.physical_page
        _start_each(self._num_pages(block, index), lambda i: self._copies(page(block.seq, first + i), slot, i))

    def wait(self, block: QueryBlock, index: Scalar, slot: Scalar) -> None:
        """Wait for the pages of key block `index` of a query block."""
        # A wait only counts bytes, and every page has as many, so it needn't know which page it waits for.
        _wait_each(self._num_pages(block, index), lambda i: self._copies(0, slot, i))

    def _num_pages(self, block: QueryBlock, index: Scalar) -> Scalar:
        left = block.num_pages - index * self._plan.pages_per_block
        return jax.lax.min(left, self._plan.pages_per_block)

    def _copies(self, page: Scalar | int, slot: Scalar, i: Scalar) -> list[Any]:
        place, semaphore = self._buffer.at[slot, i], self._semaphores.at[slot]
        return [
            pltpu.make_async_copy(self._latent.at[page], place.at[:, :, : self._split], semaphore),
            pltpu.make_async_copy(self._rope.at[page], place.at[:, :, self._split :], semaphore),
        ]


class OutputCopies:
    """Output of one block at a time, sent from `buffer` [2, queries, H, latent width] while the next is computed."""

    def __init__(self, output: Ref, buffer: Ref, in_flight: Ref, semaphores: Ref) -> None:
        self._output, self._buffer, self._in_flight, self._semaphores = output, buffer, in_flight, semaphores
        for slot in range(2):
            in_flight[slot] = 0

    def send(self, values: jax.Array, block: QueryBlock, slot: Scalar) -> None:
        """Send `values` [queries, H, latent width], once what was sent from the same slot has left."""
        self._drain(slot)
        self._buffer[slot, : values.shape[0]] = values
        self._start(block.first_token, block.num_queries, slot, lambda i: i)

    def finish(self, num_tokens: Scalar, capacity: int) -> None:
        """Clear the rows of the output from num_tokens up to capacity, then wait for all that is under way."""
        self._drain(0)
        self._buffer[0, 0] = jnp.zeros_like(self._buffer[0, 0])
        self._start(num_tokens, capacity - num_tokens, 0, lambda i: 0)
        for slot in range(2):
            self._drain(slot)

    def _start(self, token: Scalar, count: Scalar, slot: Scalar | int, row: Callable[[Scalar], Scalar | int]) -> None:
        _start_each(count, lambda i: [self._copy(token + i, slot, row(i))])
        self._in_flight[slot] = count

    def _drain(self, slot: Scalar | int) -> None:
        _wait_each(self._in_flight[slot], lambda i: [self._copy(0, slot, 0)])
        self._in_flight[slot] = 0

    def _copy(self, token: Scalar | int, slot: Scalar | int, row: Scalar | int) -> Any:
        return pltpu.make_async_copy(self._buffer.at[slot, row], self._output.at[token], self._semaphores.at[slot])
