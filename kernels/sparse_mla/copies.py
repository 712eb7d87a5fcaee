"""Asynchronous copies of units from HBM into a double buffer in VMEM."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.sparse_mla.sources import Geometry

Ref = Any
Scalar = jax.Array | int


class UnitCopies:
    """Copies into `buffer` [2, units, *tokens of a copy, width], one semaphore a slot.

    Only units with a token to attend are fetched: nothing else is ever read, and a wait is for as many copies as were
    started.
    """

    def __init__(
        self, geometry: Geometry, table: Ref, keys: Ref, tail: Ref | None = None, *, buffer: Ref, semaphores: Ref
    ) -> None:
        self._geometry, self._table, self._keys, self._tail = geometry, table, keys, tail
        self._buffer, self._semaphores = buffer, semaphores

    def start(self, base: Scalar, place_of: Any, units: Scalar, slot: Scalar) -> jax.Array:
        """Start copies of a chunk.

        Args:
          base: where the query's sequence begins, see `Source.base`.
          place_of: gives the place of unit j of the chunk, -1 for a unit without tokens.
          units: of the chunk.
          slot: of the buffer, 0 or 1.

        Returns:
          How many copies were started.
        """

        def start_one(j: Scalar, started: Scalar) -> Scalar:
            place = place_of(j)
            live = place >= 0

            @pl.when(live)
            def _() -> None:
                self._start(base, place, self._buffer.at[slot, j], self._semaphores.at[slot])

            return started + live.astype(jnp.int32)

        return jax.lax.fori_loop(0, units, start_one, jnp.int32(0))

    def wait(self, count: Scalar, slot: Scalar) -> None:
        """Wait for `count` copies into a slot."""
        place, semaphore = self._buffer.at[slot], self._semaphores.at[slot]
        units = self._buffer.shape[1]

        # A wait only counts bytes: all copies of a full chunk at once, or one after the other.
        @pl.when(count == units)
        def _() -> None:
            pltpu.make_async_copy(place, place, semaphore).wait()

        @pl.when(count < units)
        def _() -> None:
            one = place.at[0]
            jax.lax.fori_loop(0, count, lambda _, __: pltpu.make_async_copy(one, one, semaphore).wait(), None)

    def _start(self, base: Scalar, place: Scalar, target: Ref, semaphore: Ref) -> None:
        geometry = self._geometry
        if geometry.paged:
            page = self._table[base + jax.lax.div(place, geometry.places)]
            rows = geometry.span // geometry.step
            row = jax.lax.rem(place, geometry.places)
            pltpu.make_async_copy(self._keys.at[page, pl.ds(row, rows)], target, semaphore).start()
            return
        token = pl.multiple_of(place * geometry.step, geometry.step)
        if self._tail is None:
            pltpu.make_async_copy(self._keys.at[base, pl.ds(token, geometry.span)], target, semaphore).start()
            return

        @pl.when(token == geometry.last)
        def _() -> None:
            pltpu.make_async_copy(self._tail.at[base], target, semaphore).start()

        if geometry.last:

            @pl.when(token < geometry.last)
            def _() -> None:
                pltpu.make_async_copy(self._keys.at[base, pl.ds(token, geometry.span)], target, semaphore).start()
