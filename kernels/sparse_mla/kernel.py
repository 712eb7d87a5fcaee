"""The Pallas kernel: one grid step a query, copies running ahead of the arithmetic.

While a chunk of a query's units is computed the next one is on its way: the query's next chunk, or the first one of
the next query. Keys lie on the lane axis of the scores, so few heads still fill whole vectors.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.layout import LANES
from kernels.sparse_mla.copies import UnitCopies
from kernels.sparse_mla.selection import WORD_BITS, Chunks, Selection
from kernels.sparse_mla.softmax import Softmax
from kernels.sparse_mla.sources import Geometry, Source, tail_of

Ref = Any
Scalar = jax.Array | int


@dataclass(frozen=True)
class Plan:
    """Static sizes and options of a call."""

    geometry: Geometry
    chunks: Chunks
    kv_lora_rank: int
    sm_scale: float


def _kernel(
    plan: Plan,
    num_chunks: Ref,
    base: Ref,
    table: Ref,
    places: Ref,
    next_places: Ref,
    key_bits: Ref,
    row_bits: Ref,
    q: Ref,
    *rest: Ref,
) -> None:
    *keys, output, buffer, semaphores, progress, words, maximum, denominator, weighted = rest
    copies = UnitCopies(plan.geometry, table, *keys, buffer=buffer, semaphores=semaphores)
    softmax = Softmax(plan.kv_lora_rank, plan.sm_scale, words, maximum, denominator, weighted)
    query, units = pl.program_id(0), plan.chunks.units
    queries = pl.num_programs(0)
    following = jnp.minimum(query + 1, queries - 1)

    # Slot and copies under way of the chunk to compute next, from one grid step to the next.
    @pl.when(query == 0)
    def _() -> None:
        progress[0] = 0
        progress[1] = copies.start(base[0], lambda j: places[0, j], units, 0)

    def take_in(chunk: Scalar, carry: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        slot, under_way = carry
        last = chunk + 1 == num_chunks[query]
        ahead = jnp.where(last, 0, (chunk + 1) * units)
        count = copies.start(
            base[jnp.where(last, following, query)],
            lambda j: jnp.where(last, next_places[0, j], places[0, ahead + j]),
            jnp.where(last & (query + 1 == queries), 0, units),
            1 - slot,
        )
        copies.wait(under_way, slot)

        @pl.when(under_way > 0)
        def _() -> None:
            word, bit = chunk // WORD_BITS, chunk % WORD_BITS
            gathered = buffer[slot].reshape(plan.chunks.keys, -1)
            softmax.add(q[...], gathered, key_bits[word] >> bit & 1, row_bits[word] >> bit & 1)

        return 1 - slot, count

    softmax.clear()
    progress[0], progress[1] = jax.lax.fori_loop(0, num_chunks[query], take_in, (progress[0], progress[1]))
    output[...] = softmax.result()


def attend(plan: Plan, q: jax.Array, source: Source, selection: Selection, interpret: Any) -> jax.Array:
    """Attend to the selected tokens.

    Args:
      plan: static sizes and options.
      q: [Q, H, Dk].
      source: where keys lie.
      selection: what each query lists.
      interpret: as `pl.pallas_call` takes it.

    Returns:
      [Q, H, kv_lora_rank] float32.
    """
    queries, heads, width = q.shape
    chunks, geometry = plan.chunks, plan.geometry
    span = (geometry.span // geometry.step, geometry.step) if geometry.paged else (geometry.span,)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands = [source.keys, tail_of(source.keys, geometry)] if geometry.has_tail else [source.keys]

    def a_query(*shape: int, memory_space: Any = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i, *_: (i, *[0] * len(shape)), memory_space=memory_space)

    places = selection.places
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((queries, heads, plan.kv_lora_rank), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(queries,),
            in_specs=[
                a_query(*places.shape[1:], memory_space=pltpu.SMEM),
                pl.BlockSpec(
                    (None, 1, chunks.units),
                    lambda i, *_: (jnp.minimum(i + 1, queries - 1), 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                a_query(*selection.key_bits.shape[1:]),
                a_query(*selection.row_bits.shape[1:]),
                a_query(heads, width),
                *[in_hbm] * len(operands),
            ],
            out_specs=a_query(heads, plan.kv_lora_rank),
            scratch_shapes=[
                pltpu.VMEM((2, chunks.units, *span, source.keys.shape[-1]), source.keys.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.VMEM((chunks.rows, source.keys.shape[-1]), jnp.int32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, plan.kv_lora_rank), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="sparse_mla_attention",
    )(
        selection.chunks,
        source.base,
        source.table,
        places,
        places[..., : chunks.units],
        selection.key_bits,
        selection.row_bits,
        q,
        *operands,
    )
