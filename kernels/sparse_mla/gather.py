"""Where the units that a query lists lie, and which of the fetched rows it may see.

A copy moves whole granules, since a TPU copies no single row of a tiled axis: a packed row [packing, width] of a paged
cache, or a tile of rows of a flat KV. So a unit is fetched with the neighbours that share its first and last granule,
and masks tell its own tokens. All of this is integer arithmetic that XLA does once a call: six bytes a fetched row,
next to the thousand that the row has.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.layout import LANES, SUBLANES, align, cdiv, packing


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Static sizes of what is copied for one unit and for one chunk of units."""

    read_block: int
    """Tokens a unit."""
    packing: int
    """Rows that share a 32-bit sublane."""
    granule: int
    """Every copy starts at a multiple of this many rows."""
    rows: int
    """Rows fetched for a unit, its neighbours included."""
    piece: int
    """Rows of one copy."""
    units: int
    """Units a chunk."""

    @classmethod
    def of(cls, kv: jax.Array, read_block: int, block_units: int) -> "Fetch":
        """For units of a flat [B, T, Dk] or a paged (rank 4) `kv`; the rows of a chunk fill whole tiles."""
        pk, paged = packing(kv.dtype), kv.ndim == 4
        tile = SUBLANES * pk
        granule = pk if paged else tile
        rows = align(read_block + granule - math.gcd(read_block, granule), granule)
        whole = paged or (read_block % granule == 0 and kv.shape[1] % read_block == 0)
        units = align(block_units, tile // math.gcd(rows, tile))
        return cls(read_block, pk, granule, rows, rows if whole else granule, units)

    @property
    def paged(self) -> bool:
        """Whether copies move packed rows of a cache, not tiles of a flat KV."""
        return self.granule == self.packing

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk."""
        return self.units * self.rows


@dataclasses.dataclass(frozen=True)
class Gather:
    """What each of Q = B * S queries fetches and sees, chunk by chunk."""

    place: jax.Array
    """[Q, 1, chunks * units] int32: first granule of each unit, in its batch row or the cache; -1: not fetched."""
    visible: jax.Array
    """[Q, chunks, 1, chunk_rows] int32: 1 where a fetched row is attended, else 0."""
    words: jax.Array
    """[Q, chunks, 1, words] int32: the same as a mask of each 32-bit sublane; words are padded to whole lanes."""


def gather(units: jax.Array, last: jax.Array, find: Callable[[jax.Array], jax.Array], fetch: Fetch) -> Gather:
    """Plan the copies of a call.

    Args:
      units: [Q, K] int32 unit ids, padding and ids past every length among them.
      last: [Q] int32, the last token that each query may see; negative for none.
      find: the granule at which a unit [Q, K] starts; asked for real units only, 0 standing in for the others.
      fetch: the static sizes.
    """
    # Compared in units, not tokens: the tokens of a large id would wrap.
    real = (units >= 0) & (units <= (last // fetch.read_block)[:, None])
    units = jnp.where(real, units, 0)
    place = jnp.where(real, find(units), -1)
    first = units * fetch.read_block
    row = jnp.arange(fetch.rows, dtype=jnp.int32)
    token = (first // fetch.granule * fetch.granule)[..., None] + row
    first, last = first[..., None], last[:, None, None]
    visible = real[..., None] & (token >= first) & (token < first + fetch.read_block) & (token <= last)
    queries, count = units.shape
    chunks = cdiv(count, fetch.units)
    missing = chunks * fetch.units - count
    place = jnp.pad(place, ((0, 0), (0, missing)), constant_values=-1)[:, None]
    visible = jnp.pad(visible.astype(jnp.int32), ((0, 0), (0, missing), (0, 0)))
    visible = visible.reshape(queries, chunks, 1, fetch.chunk_rows)
    return Gather(place, visible, _words(visible, fetch.packing))


def _words(visible: jax.Array, packing: int) -> jax.Array:
    """Masks of whole sublanes: the lowest bits of a word belong to the first of its `packing` rows."""
    bits = 32 // packing
    masks = np.array([((1 << bits) - 1) << (bits * row) for row in range(packing)], np.uint32).view(np.int32)
    words = jnp.sum(visible.reshape(*visible.shape[:3], -1, packing) * masks, axis=-1, dtype=jnp.int32)
    missing = align(words.shape[-1], LANES) - words.shape[-1]
    return jnp.pad(words, ((0, 0),) * 3 + ((0, missing),))
