"""Asynchronous copies of the units of one chunk from HBM into one of two buffers in VMEM.

Every copy has a static size, which the HLO interpreter needs, and whole granules, which a TPU needs. A wait repeats the
conditions of the start, so that each copy is awaited exactly once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.sparse_mla.gather import Fetch

Ref = Any
Scalar = jax.Array


class PagedCopies:
    """From a cache seen as packed rows [N * page_size / packing, packing, width]: one copy a unit."""

    def __init__(self, fetch: Fetch, kv: Ref, buffer: Ref, semaphores: Ref) -> None:
        self._fetch, self._kv, self._buffer, self._semaphores = fetch, kv, buffer, semaphores

    def start(self, place: Ref, batch: Scalar, chunk: Scalar, slot: Scalar) -> None:
        """Start fetching the units of a chunk; `place` is [1, 1, units of a query] in SMEM."""
        _each_unit(self._fetch, place, chunk, lambda unit, granule: self._copy(unit, granule, slot).start())

    def wait(self, place: Ref, batch: Scalar, chunk: Scalar, slot: Scalar) -> None:
        """Wait for the units of a chunk."""
        _each_unit(self._fetch, place, chunk, lambda unit, granule: self._copy(unit, granule, slot).wait())

    def _copy(self, unit: Scalar, granule: Scalar, slot: Scalar) -> Any:
        rows = self._kv.at[pl.ds(granule, self._fetch.rows // self._fetch.packing)]
        return pltpu.make_async_copy(rows, self._buffer.at[slot, unit], self._semaphores.at[slot])


class FlatCopies:
    """From a flat KV [B, T, Dk], whose rows past the last whole granule stand in `tail` [B, granule, Dk], if any do."""

    def __init__(self, fetch: Fetch, kv: Ref, tail: Ref | None, buffer: Ref, semaphores: Ref) -> None:
        self._fetch, self._kv, self._tail, self._buffer, self._semaphores = fetch, kv, tail, buffer, semaphores

    def start(self, place: Ref, batch: Scalar, chunk: Scalar, slot: Scalar) -> None:
        """Start fetching the units of a chunk of a query of batch row `batch`."""
        self._each_piece(place, batch, chunk, slot, lambda copy: copy.start())

    def wait(self, place: Ref, batch: Scalar, chunk: Scalar, slot: Scalar) -> None:
        """Wait for the units of a chunk."""
        self._each_piece(place, batch, chunk, slot, lambda copy: copy.wait())

    def _each_piece(
        self, place: Ref, batch: Scalar, chunk: Scalar, slot: Scalar, act: Callable[[Any], None]
    ) -> None:
        fetch = self._fetch
        whole = self._kv.shape[1] // fetch.piece * fetch.piece

        def unit_pieces(unit: Scalar, granule: Scalar) -> None:
            for offset in range(0, fetch.rows, fetch.piece):
                row = granule * fetch.granule + offset
                target = self._buffer.at[slot, unit, pl.ds(offset, fetch.piece)]
                rows = self._kv.at[batch, pl.ds(pl.multiple_of(row, fetch.granule), fetch.piece)]

                @pl.when(row < whole)
                def _(rows: Ref = rows, target: Ref = target) -> None:
                    act(pltpu.make_async_copy(rows, target, self._semaphores.at[slot]))

                if self._tail is not None:

                    @pl.when(row == whole)
                    def _(target: Ref = target) -> None:
                        act(pltpu.make_async_copy(self._tail.at[batch], target, self._semaphores.at[slot]))

        _each_unit(fetch, place, chunk, unit_pieces)


def _each_unit(fetch: Fetch, place: Ref, chunk: Scalar, act: Callable[[Scalar, Scalar], None]) -> None:
    """Call act(unit, granule) for the units of a chunk that are fetched."""

    def visit(unit: Scalar, _: None) -> None:
        granule = place[0, 0, chunk * fetch.units + unit]

        @pl.when(granule >= 0)
        def _() -> None:
            act(unit, granule)

    jax.lax.fori_loop(0, fetch.units, visit, None)


def flat_tail(kv: jax.Array, granule: int) -> jax.Array | None:
    """The rows of `kv` [B, T, Dk] past the last whole granule, padded to one: [B, granule, Dk]; None when there are none."""
    odd = kv.shape[1] % granule
    if not odd:
        return None
    return jnp.pad(kv[:, kv.shape[1] - odd :], ((0, 0), (0, granule - odd), (0, 0)))
