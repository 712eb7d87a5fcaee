"""The Pallas kernel: one pass over all query blocks of a batch, copies running ahead of the arithmetic.

While a block of keys is computed, the next one is on its way: of the same query block, or the first one of the next
query block, be it of another sequence or another range of the distribution. Queries are fetched a query block ahead,
and a block's output leaves while the next block is computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.dense_mla.copies import KeyCopies, OutputCopies, QueryCopies
from kernels.dense_mla.plan import Plan
from kernels.dense_mla.schedule import QueryBlock, Scalar, Schedule, next_sequence_with_queries
from kernels.dense_mla.softmax import Softmax
from kernels.layout import LANES

Ref = Any


class _Progress(NamedTuple):
    """What the loop over query blocks carries."""

    block: QueryBlock
    """The query block to compute; its queries and its first keys are on their way."""
    query_blocks: Scalar
    """Query blocks done; its parity is the slot of the block's queries and output."""
    key_blocks: Scalar
    """Key blocks done; its parity is the slot of the next one's keys."""


def _kernel(
    plan: Plan,
    kv_lens: Ref,
    page_indices: Ref,
    cu_q_lens: Ref,
    distribution: Ref,
    next_seq: Ref,
    q_latent: Ref,
    q_rope: Ref,
    cache_latent: Ref,
    cache_rope: Ref,
    output: Ref,
    query_buffer: Ref,
    key_buffer: Ref,
    output_buffer: Ref,
    in_flight: Ref,
    query_semaphores: Ref,
    key_semaphores: Ref,
    output_semaphores: Ref,
    *softmax_state: Ref,
) -> None:
    schedule = Schedule(plan, kv_lens, page_indices, cu_q_lens, distribution, next_seq)
    query_copies = QueryCopies(plan, q_latent, q_rope, query_buffer, query_semaphores)
    key_copies = KeyCopies(plan, schedule, cache_latent, cache_rope, key_buffer, key_semaphores)
    output_copies = OutputCopies(output, output_buffer, in_flight, output_semaphores)

    def report(message: str, *values: Scalar) -> None:
        if plan.debug:
            pl.debug_print(message, *values)

    def compute(num_queries: int, progress: _Progress) -> _Progress:
        block, following = progress.block, schedule.after(progress.block)
        report("sequence {}: queries from position {}, {} of them", block.seq, block.position, block.num_queries)
        slot = progress.query_blocks % 2
        query_copies.start(following, 1 - slot)
        query_copies.wait(block, slot)
        softmax = Softmax(plan, num_queries, *softmax_state)
        num_key_blocks = jnp.maximum((block.num_pages + (plan.pages_per_block - 1)) // plan.pages_per_block, 1)

        def take_in(index: Scalar, done: Scalar) -> Scalar:
            report("sequence {}: key block {} of {}", block.seq, index, num_key_blocks)
            key_slot = done % 2
            last = index + 1 == num_key_blocks
            ahead = jax.tree.map(lambda a, b: jnp.where(last, a, b), following, block)
            key_copies.start(ahead, jnp.where(last, 0, index + 1), 1 - key_slot)
            key_copies.wait(block, index, key_slot)
            queries = query_buffer[slot, :num_queries].reshape(-1, plan.width).astype(plan.dot_dtype)
            keys = key_buffer[key_slot].reshape(-1, plan.width).astype(plan.dot_dtype)
            softmax.add(queries, keys, block, (block.first_page * plan.page_size) + index * plan.keys_per_block)
            return done + 1

        key_blocks = jax.lax.fori_loop(0, num_key_blocks, take_in, progress.key_blocks)
        output_copies.send(softmax.result(), block, slot)
        return _Progress(following, progress.query_blocks + 1, key_blocks)

    first = schedule.first()
    query_copies.start(first, 0)
    key_copies.start(first, 0, 0)
    progress = _Progress(first, jnp.int32(0), jnp.int32(0))
    for end, num_queries in _ranges(plan, schedule):
        progress = jax.lax.while_loop(
            lambda progress, end=end: progress.block.seq < end, functools.partial(compute, num_queries), progress
        )
    output_copies.finish(schedule.num_tokens(), plan.num_tokens)


def _ranges(plan: Plan, schedule: Schedule) -> list[tuple[Scalar, int]]:
    """Ends of the ranges of sequences, each with the queries of its blocks; ranges of equal blocks are one."""
    ranges = [
        (schedule.decode_end, 1),
        (schedule.chunk_end, plan.chunk_queries_per_block),
        (schedule.num_active, plan.queries_per_block),
    ]
    return [this for this, behind in zip(ranges, [*ranges[1:], (None, 0)], strict=True) if this[1] != behind[1]]


def attend(
    plan: Plan,
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache_latent: jax.Array,
    cache_rope: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> jax.Array:
    """Attend to caches that hold the new rows already.

    Args:
      plan: static sizes and options.
      q_latent: [T, H, latent width], H and widths padded to whole tiles as `plan` says.
      q_rope: [T, H, rope width].
      cache_latent: [N, page_size / packing, packing, latent width].
      cache_rope: [N, page_size / packing, packing, rope width].
      kv_lens, page_indices, cu_q_lens, distribution: as `mla_ragged_paged_attention` takes them.

    Returns:
      [T, H, latent width] in the queries' dtype.
    """
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    queries, rows = plan.max_queries_per_block, plan.max_queries_per_block * plan.num_heads
    page_shape = (plan.page_size // plan.packing, plan.packing, plan.width)
    double_buffered = pltpu.SemaphoreType.DMA((2,))
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct(q_latent.shape, q_latent.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[in_hbm] * 4,
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((2, queries, plan.num_heads, plan.width), plan.q_dtype),
                pltpu.VMEM((2, plan.pages_per_block, *page_shape), plan.kv_dtype),
                pltpu.VMEM((2, queries, plan.num_heads, plan.latent_width), plan.q_dtype),
                pltpu.SMEM((2,), jnp.int32),
                double_buffered,
                double_buffered,
                double_buffered,
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, plan.sum_lanes), jnp.float32),
                pltpu.VMEM((rows, plan.latent_width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=plan.vmem_limit_bytes),
        name=plan.name,
    )(
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        next_sequence_with_queries(cu_q_lens, distribution),
        q_latent,
        q_rope,
        cache_latent,
        cache_rope,
    )
