"""The Pallas kernel: one grid step a query, its listed units gathered chunk by chunk.

While a chunk is computed the next one is on its way, of the same query or of the next. Scores are [heads, rows]: keys
lie along the lanes, so few heads waste no lanes, and each chunk is one matmul for the scores and one for the values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.layout import LANES, cdiv
from kernels.sparse_mla.copies import FlatCopies, PagedCopies
from kernels.sparse_mla.gather import Fetch, Gather

Ref = Any
Scalar = jax.Array

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a row that isn't attended: below every score, and finite, so that no difference of two is NaN."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one compiled kernel."""

    fetch: Fetch
    queries: int
    """Queries a batch row."""
    chunks: int
    """Chunks a query."""
    value_width: int
    """Columns of the weighted sum."""
    sm_scale: float


def _kernel(plan: Plan, place: Ref, place_ahead: Ref, q: Ref, words: Ref, visible: Ref, *refs: Ref) -> None:
    *sources, out, buffer, semaphores, maximum, denominator, weighted = refs
    if plan.fetch.paged:
        copies = PagedCopies(plan.fetch, *sources, buffer, semaphores)
    else:
        copies = FlatCopies(plan.fetch, sources[0], sources[1] if len(sources) > 1 else None, buffer, semaphores)
    query, count = pl.program_id(0), pl.num_programs(0)
    row, row_ahead = query // plan.queries, (query + 1) // plan.queries

    @pl.when(query == 0)
    def _() -> None:
        copies.start(place, row, jnp.int32(0), jnp.int32(0))

    maximum[...] = jnp.full(maximum.shape, MASKED, jnp.float32)
    denominator[...] = jnp.zeros(denominator.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    def take_in(chunk: Scalar, _: None) -> None:
        slot = (query * plan.chunks + chunk) % 2
        last = chunk + 1 == plan.chunks

        @pl.when(jnp.logical_not(last))
        def _() -> None:
            copies.start(place, row, chunk + 1, 1 - slot)

        @pl.when(last & (query + 1 < count))
        def _() -> None:
            copies.start(place_ahead, row_ahead, jnp.int32(0), 1 - slot)

        copies.wait(place, row, chunk, slot)
        keys = _only_visible(buffer[slot].reshape(plan.fetch.chunk_rows, -1), words[0, chunk])
        _add(plan, q[0], keys, visible[0, chunk] != 0, maximum, denominator, weighted)

    jax.lax.fori_loop(0, plan.chunks, take_in, None)
    total = jnp.sum(denominator[...], axis=1, keepdims=True)
    out[0] = weighted[...] / jnp.where(total == 0.0, 1.0, total)


def _only_visible(rows: jax.Array, words: jax.Array) -> jax.Array:
    """`rows` [rows, width] with zeros in those that `words` [1, words] hides.

    A weight of zero leaves NaN a NaN, so hidden rows must go before either matmul. They go by their bits, whole
    sublanes at a time, which is one operation for `packing` rows and needs no narrow comparison.
    """
    count, width = rows.shape
    column = jnp.broadcast_to(words, (LANES, words.shape[1])).T[: count * rows.dtype.itemsize // 4]
    mask = jnp.concatenate([column] * cdiv(width, LANES), axis=1)[:, :width]
    return pltpu.bitcast(pltpu.bitcast(rows, jnp.int32) & mask, rows.dtype)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """a . b over one axis of each, summed in float32; float32 inputs keep all their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _add(
    plan: Plan, q: jax.Array, keys: jax.Array, visible: jax.Array, maximum: Ref, denominator: Ref, weighted: Ref
) -> None:
    """Take one chunk into the online softmax (Milakov and Gimelshein, arXiv:1805.02867).

    q is [heads, width], keys [rows, width], visible [1, rows]; maximum and denominator [heads, 128] hold equal lanes
    and partial sums. Weights are rounded to the keys' dtype for the value product only: their sum keeps float32, and
    rounding to nearest errs to both sides alike.
    """
    scores = jnp.where(visible, _dot(q, keys, (1, 1)) * plan.sm_scale, MASKED)
    old = maximum[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    decay = jnp.exp(old - new)
    # A chunk without a visible row leaves the maximum at MASKED, where a hidden row's weight would be exp(0).
    weights = jnp.where(visible, jnp.exp(scores - new[:, :1]), 0.0)
    values = keys[:, : plan.value_width]
    maximum[...] = new
    denominator[...] = denominator[...] * decay + _lane_sums(weights)
    weighted[...] = weighted[...] * decay[:, :1] + _dot(weights.astype(keys.dtype), values, (1, 0))


def _lane_sums(weights: jax.Array) -> jax.Array:
    """Sums of `weights` [heads, rows] spread over 128 lanes: whole vectors are added, lanes at the very end only."""
    heads, rows = weights.shape
    missing = -rows % LANES
    padded = jnp.concatenate([weights, jnp.zeros((heads, missing), jnp.float32)], axis=1) if missing else weights
    return sum(padded[:, i : i + LANES] for i in range(0, rows + missing, LANES))


def attend(plan: Plan, q: jax.Array, sources: list[jax.Array], gathered: Gather, interpret: Any) -> jax.Array:
    """Attend from every query.

    Args:
      plan: static facts.
      q: [Q, heads, width], heads padded to whole tiles.
      sources: a paged cache as packed rows [M, packing, width]; or a flat KV [B, T, width] and its tail, if it has one.
      gathered: what each query fetches and sees.
      interpret: as pallas_call takes it.

    Returns:
      [Q, heads, value_width] float32.
    """
    count, heads, width = q.shape
    fetch, kv = plan.fetch, sources[0]
    unit = (fetch.rows // fetch.packing, fetch.packing, width) if fetch.paged else (fetch.rows, width)

    def of_query(shape: tuple[int, ...], **options: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape[1:]), lambda i: (i,) + (0,) * (len(shape) - 1), **options)

    place = gathered.place
    ahead = pl.BlockSpec((1, 1, place.shape[2]), lambda i: (jnp.minimum(i + 1, count - 1), 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((count, heads, plan.value_width), jnp.float32),
        grid=(count,),
        in_specs=[
            of_query(place.shape, memory_space=pltpu.SMEM),
            ahead,
            of_query(q.shape),
            of_query(gathered.words.shape),
            of_query(gathered.visible.shape),
            *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in sources],
        ],
        out_specs=of_query((count, heads, plan.value_width)),
        scratch_shapes=[
            pltpu.VMEM((2, fetch.units, *unit), kv.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((heads, LANES), jnp.float32),
            pltpu.VMEM((heads, LANES), jnp.float32),
            pltpu.VMEM((heads, plan.value_width), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name=f"sparse_mla-rb_{fetch.read_block}-bu_{fetch.units}",
    )(place, place, q, gathered.words, gathered.visible, *sources)
