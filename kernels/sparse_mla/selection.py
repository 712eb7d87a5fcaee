"""Turn the listed units into what the kernel needs: where each is fetched, and which fetched tokens count.

Plain elementwise XLA: it reads no key and no page table.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.layout import LANES, SUBLANES, align, cdiv, packing
from kernels.sparse_mla.sources import Geometry

WORD_BITS = 32


@dataclass(frozen=True)
class Chunks:
    """Static sizes of the steps in which a query's units are gathered."""

    count: int
    """Chunks a query."""
    units: int
    """Units a chunk."""
    keys: int
    """Tokens fetched a chunk, neighbours included: whole tiles of the keys' dtype."""
    packing: int
    """Tokens a 32-bit word of the gathered keys."""

    @property
    def words(self) -> int:
        """32-bit words that hold a bit for each chunk."""
        return cdiv(self.count, WORD_BITS)

    @property
    def rows(self) -> int:
        """Rows of 32-bit words a chunk."""
        return self.keys // self.packing


class Selection(NamedTuple):
    """What Q queries list."""

    chunks: jax.Array
    """[Q] int32, chunks up to the last one with a token to attend, at least 1."""
    places: jax.Array
    """[Q, 1, chunks * units] int32, where each unit's copy begins, in steps from the start of its sequence (a page
    before which lie only whole ones); -1 for a unit without a token to attend."""
    key_bits: jax.Array
    """[Q, words, 1, keys] int32; bit c of word w tells whether the key is attended in chunk w * 32 + c."""
    row_bits: jax.Array
    """[Q, words, packing, align(rows, 128)] int32, the same by row of words and token in it."""


def split(units: int, block_units: int, geometry: Geometry, dtype: jax.typing.DTypeLike) -> Chunks:
    """Split `units` a query into chunks of `block_units`, or a few more where a tile of `dtype` has room for them."""
    tile = SUBLANES * packing(dtype)
    fill = tile // math.gcd(geometry.span, tile)
    a_chunk = align(min(block_units, units), fill)
    return Chunks(cdiv(units, a_chunk), a_chunk, a_chunk * geometry.span, packing(dtype))


def select(
    indices: jax.Array, positions: jax.Array, lengths: jax.Array, geometry: Geometry, chunks: Chunks
) -> Selection:
    """Locate the units `indices` [Q, K] of queries at `positions` [Q] in sequences of `lengths` [Q] tokens."""
    queries, listed = indices.shape
    # Only where it can't wrap is the position's successor taken.
    end = jnp.where(positions < lengths, positions + 1, lengths)[:, None]
    padding = jnp.full((queries, chunks.count * chunks.units - listed), -1, jnp.int32)
    units = jnp.concatenate([indices, padding], axis=1)
    live = (units >= 0) & (units < -(-end // geometry.read_block))
    first = jnp.where(live, units, 0) * geometry.read_block
    start, places = _copies(first, geometry)
    token = start[..., None] + jnp.arange(geometry.span, dtype=jnp.int32)
    first, end = first[..., None], end[..., None]
    attended = live[..., None] & (token >= first) & (token < first + geometry.read_block) & (token < end)
    key_bits = _bits(attended.reshape(queries, chunks.count, chunks.keys), chunks)
    row_bits = key_bits.reshape(queries, chunks.words, chunks.rows, chunks.packing).swapaxes(2, 3)
    row_bits = jnp.pad(row_bits, ((0, 0),) * 3 + ((0, align(chunks.rows, LANES) - chunks.rows),))
    occupied = jnp.any(live.reshape(queries, chunks.count, chunks.units), axis=2)
    last = jnp.max(jnp.where(occupied, jnp.arange(1, chunks.count + 1, dtype=jnp.int32), 1), axis=1)
    return Selection(last, jnp.where(live, places, -1)[:, None], key_bits[:, :, None], row_bits)


def _copies(first: jax.Array, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """For units that begin at token `first`: the token at which their copies begin, and that in steps."""
    segment = first // geometry.segment if geometry.paged else jnp.zeros_like(first)
    begin = segment * geometry.segment
    step = jnp.minimum((first - begin) // geometry.step, geometry.last // geometry.step)
    return begin + step * geometry.step, segment * geometry.places + step


def _bits(attended: jax.Array, chunks: Chunks) -> jax.Array:
    """Pack bool [Q, chunks, keys] into int32 [Q, words, keys], one bit a chunk."""
    queries, count, keys = attended.shape
    attended = jnp.pad(attended, ((0, 0), (0, chunks.words * WORD_BITS - count), (0, 0)))
    attended = attended.reshape(queries, chunks.words, WORD_BITS, keys).astype(jnp.uint32)
    shift = jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]
    return jax.lax.bitcast_convert_type(jnp.sum(attended << shift, axis=2, dtype=jnp.uint32), jnp.int32)
