"""Where keys lie: how a unit's tokens are found and fetched from flat, paged or packed ragged keys.

Keys are segments of consecutive tokens: a flat batch row, or a page. A TPU copies whole tiles, so a copy begins at a
multiple of `step` tokens in its segment and takes `span` tokens: the unit, and neighbours where the tiles make it so.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.layout import SUBLANES, align


@dataclass(frozen=True)
class Geometry:
    """Static sizes of the copies of one unit each."""

    read_block: int
    """Tokens a unit."""
    segment: int
    """Tokens a flat batch row or a page."""
    step: int
    """Copies begin at multiples of this many tokens: a tile's rows, or the tokens packed in a row of a page."""
    paged: bool

    @property
    def span(self) -> int:
        """Tokens a copy: whole steps that hold a unit wherever it begins."""
        return align(self.read_block + self.step - math.gcd(self.read_block, self.step), self.step)

    @property
    def last(self) -> int:
        """Where the last copy of a segment begins; it ends with the segment's last step."""
        return max(0, align(self.segment, self.step) - self.span)

    @property
    def places(self) -> int:
        """Steps a page."""
        return self.segment // self.step

    @property
    def has_tail(self) -> bool:
        """Whether the last copy reaches past the segment, and so needs an array of its own to read."""
        return self.last + self.span > self.segment


class Source(NamedTuple):
    """Keys of a call with Q queries."""

    keys: jax.Array
    """Flat [B, T, Dk] or paged [N, page_size / packing, packing, align(Dk, 128)]."""
    lengths: jax.Array
    """[Q] int32, tokens of a query's sequence."""
    base: jax.Array
    """[Q] int32, a query's batch row (flat), or where its pages begin in `table`."""
    table: jax.Array
    """Physical pages [pages of all sequences] int32; one unused entry when flat."""


def flat_geometry(kv: jax.Array, read_block: int) -> Geometry:
    """Geometry of flat keys [B, T, Dk], whose tiles in HBM have 8 rows for every dtype."""
    return Geometry(read_block, kv.shape[1], SUBLANES, paged=False)


def paged_geometry(kv: jax.Array, read_block: int) -> Geometry:
    """Geometry of a paged cache [N, page_size / packing, packing, width], each of whose packed rows is a tile."""
    return Geometry(read_block, kv.shape[1] * kv.shape[2], kv.shape[2], paged=True)


def flat_source(kv: jax.Array, queries: int) -> Source:
    """Source of flat keys [B, T, Dk] with `queries` a batch row."""
    batch, tokens, _ = kv.shape
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), queries)
    return Source(kv, jnp.full(row.shape, tokens, jnp.int32), row, jnp.zeros(1, jnp.int32))


def paged_source(kv: jax.Array, page_table: jax.Array, seq_len: int, queries: int) -> Source:
    """Source of one page table a batch row, [B, pages], with `queries` a batch row."""
    batch, pages = page_table.shape
    base = jnp.repeat(jnp.arange(batch, dtype=jnp.int32) * pages, queries)
    return Source(kv, jnp.full(base.shape, seq_len, jnp.int32), base, page_table.reshape(-1))


def ragged_source(
    kv: jax.Array,
    page_size: int,
    q_seq_id: jax.Array,
    seq_lens: jax.Array,
    cu_kv_lens: jax.Array,
    page_indices: jax.Array,
) -> Source:
    """Source of packed requests; a query whose request is none of them has no token."""
    known = (q_seq_id >= 0) & (q_seq_id < seq_lens.shape[0])
    request = jnp.where(known, q_seq_id, 0)
    return Source(kv, jnp.where(known, seq_lens[request], 0), cu_kv_lens[request] // page_size, page_indices)


def tail_of(kv: jax.Array, geometry: Geometry) -> jax.Array:
    """What the last copy of each flat batch row reads, [B, span, Dk]: its last tokens, filled up with zeros."""
    tail = kv[:, geometry.last :]
    return jnp.pad(tail, ((0, 0), (0, geometry.span - tail.shape[1]), (0, 0)))
