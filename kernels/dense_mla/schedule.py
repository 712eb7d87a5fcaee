"""The order of work: query blocks of the active sequences, each with the pages of keys it needs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.dense_mla.plan import Plan

Scalar = jax.Array
Ref = Any


def next_sequence_with_queries(cu_q_lens: jax.Array, distribution: jax.Array) -> jax.Array:
    """[S + 1]: for each slot, the first active sequence at or behind it that has queries, or n when there is none.

    So the kernel steps over empty sequences without searching for their end.
    """
    num_seqs = cu_q_lens.shape[0] - 1
    active = jnp.clip(distribution[2], 0, num_seqs)
    slot = jnp.arange(num_seqs, dtype=jnp.int32)
    has_queries = (slot < active) & (cu_q_lens[1:] > cu_q_lens[:-1])
    following = jax.lax.cummin(jnp.where(has_queries, slot, active), reverse=True)
    return jnp.append(following, active)


class QueryBlock(NamedTuple):
    """Consecutive queries of one sequence, and the keys they need; int32 scalars."""

    seq: Scalar
    """Sequence; n when no block is left."""
    first_token: Scalar
    """First query's row in the batch."""
    num_queries: Scalar
    """Queries; 0 when no block is left."""
    position: Scalar
    """First query's absolute position."""
    first_key: Scalar
    """First key with a weight for any of the queries."""
    end_key: Scalar
    """End of such keys."""
    first_page: Scalar
    """Logical page of first_key."""
    num_pages: Scalar
    """Pages up to end_key; 0 when no block is left."""


class Schedule:
    """Walks over the query blocks of a batch, reading its metadata from scalar memory."""

    def __init__(
        self, plan: Plan, kv_lens: Ref, page_indices: Ref, cu_q_lens: Ref, distribution: Ref, next_seq: Ref
    ) -> None:
        self._plan = plan
        self._kv_lens = kv_lens
        self._page_indices = page_indices
        self._cu_q_lens = cu_q_lens
        self._next_seq = next_seq
        self.num_active = next_seq[plan.num_seqs]
        self.decode_end = jnp.minimum(distribution[0], self.num_active)
        self.chunk_end = jnp.minimum(distribution[1], self.num_active)

    def first(self) -> QueryBlock:
        """The batch's first query block."""
        return self._at_start_of(self._next_seq[0])

    def after(self, block: QueryBlock) -> QueryBlock:
        """The query block behind `block`: of the same sequence if that has more, else of the next one with queries."""
        token = block.first_token + block.num_queries
        more = token < self._cu_q_lens[block.seq + 1]
        seq = jnp.where(more, block.seq, self._next_seq[block.seq + 1])
        start = self._cu_q_lens[self._readable(seq)]
        return self._block(seq, jnp.where(more, token, start))

    def physical_page(self, seq: Scalar, logical_page: Scalar) -> Scalar:
        """Where the cache holds a sequence's page."""
        return self._page_indices[seq * self._plan.pages_per_seq + logical_page]

    def num_tokens(self) -> Scalar:
        """Queries of all active sequences: rows of the output that have a meaning."""
        return jnp.clip(self._cu_q_lens[self.num_active], 0, self._plan.num_tokens)

    def _readable(self, seq: Scalar) -> Scalar:
        """`seq`, or a slot whose metadata may be read when none is left."""
        return jnp.minimum(seq, self._plan.num_seqs - 1)

    def _at_start_of(self, seq: Scalar) -> QueryBlock:
        return self._block(seq, self._cu_q_lens[self._readable(seq)])

    def _limit(self, seq: Scalar) -> Scalar:
        """Most queries of a block of `seq`: its range of the distribution tells."""
        plan = self._plan
        prefill = jnp.where(seq < self.chunk_end, plan.chunk_queries_per_block, plan.queries_per_block)
        return jnp.where(seq < self.decode_end, 1, prefill)

    def _block(self, seq: Scalar, token: Scalar) -> QueryBlock:
        plan = self._plan
        exists = seq < self.num_active
        slot = self._readable(seq)
        kv_len, end = self._kv_lens[slot], self._cu_q_lens[slot + 1]
        num_queries = jnp.where(exists, jnp.minimum(self._limit(seq), end - token), 0)
        position = kv_len - (end - token)
        first_key, end_key = jnp.int32(0), kv_len
        if not plan.masked_keys_count:
            end_key = position + num_queries
            if plan.window is not None:
                first_key = jnp.maximum(position - (plan.window - 1), 0)
        first_page = first_key // plan.page_size
        num_pages = (end_key + (plan.page_size - 1)) // plan.page_size - first_page
        num_pages = jnp.where(exists, jnp.maximum(num_pages, 0), 0)
        return QueryBlock(seq, token, num_queries, position, first_key, end_key, first_page, num_pages)
