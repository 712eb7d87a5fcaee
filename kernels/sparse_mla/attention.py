"""The public entry: validate, locate the units, attend."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.sparse_mla.kernel import Plan, attend
from kernels.sparse_mla.selection import select, split
from kernels.sparse_mla.sources import (
    flat_geometry,
    flat_source,
    paged_geometry,
    paged_source,
    ragged_source,
)
from kernels.sparse_mla.validation import validate_attention


def sparse_mla_attention(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    positions: jax.Array,
    *,
    kv_lora_rank: int = 512,
    read_block: int = 1,
    block_units: int | None = None,
    sm_scale: float | None = None,
    interpret: Any = False,
    page_table: jax.Array | None = None,
    page_size: int | None = None,
    seq_len: int | None = None,
    q_seq_id: jax.Array | None = None,
    seq_lens: jax.Array | None = None,
    cu_kv_lens: jax.Array | None = None,
    page_indices: jax.Array | None = None,
) -> jax.Array:
    """Absorbed multi-head latent attention in which every query attends the tokens of the units that it lists.

    A unit is `read_block` consecutive tokens of the query's sequence. Token t is attended when its unit is listed,
    t <= position, and t is below the sequence's length; a unit listed twice counts twice. Over these tokens

        out = sum_t softmax_t(sm_scale * q . kv_t) * kv_t[:kv_lora_rank]

    and a query without any gives exactly 0. This is the attention over selected tokens of DeepSeek-V3.2's sparse
    attention, in the absorbed form of DeepSeek-V2 (arXiv:2405.04434, section 2.1). Scores, softmax and sums are
    float32; the softmax weights are rounded to bfloat16 if the keys are.

    Nothing but listed units is read, in whole tiles: their neighbours, page tails and all else may hold NaN or Inf.
    Paged keys are read a packed row at a time at least; flat ones eight tokens, so that token-granular reads
    (read_block 1) fetch four times as much from flat bfloat16 keys as from paged ones.

    Args:
      q: absorbed queries [B, S, H, Dk], Dk = kv_lora_rank + rope; bfloat16 or float32.
      kv: keys in q's dtype, flat [B, T, Dk] or paged [N, page_size / packing, packing, align(Dk, 128)].
      indices: unit ids [B, S, K] int32. Negative ones are padding, anywhere in the list; ids past the last unit name
        no token.
      positions: [B, S] int32, each query's absolute position.
      kv_lora_rank: the leading columns of a key that are its value.
      read_block: tokens a unit; it divides page_size when paged.
      block_units: units gathered a step; required. Speed only; rounded up to whole tiles.
      sm_scale: factor of the scores, a Python number; required.
      interpret: as `pl.pallas_call` takes it: False, True, or `pltpu.InterpretParams`.
      page_table: [B, ceil(seq_len / page_size)] int32 physical pages, with one table a batch row. Entries that no
        listed unit uses may hold anything.
      page_size: tokens a page, when paged.
      seq_len: length of every row, with `page_table`.
      q_seq_id: [S] int32 request of each query, with packed ragged requests (B = 1). A query of none has no token.
      seq_lens: [n] int32 length of each request; unit ids are local to it.
      cu_kv_lens: [n + 1] int32, page-aligned: request r's pages are page_indices[cu_kv_lens[r] // page_size :].
      page_indices: int32 physical pages of all requests.

    Returns:
      [B, S, H, kv_lora_rank] float32.

    Raises:
      ValueError: shapes, dtypes or options don't fit together; the message names the argument.
    """
    validate_attention(
        q,
        kv,
        indices,
        positions,
        kv_lora_rank=kv_lora_rank,
        read_block=read_block,
        block_units=block_units,
        sm_scale=sm_scale,
        page_table=page_table,
        page_size=page_size,
        seq_len=seq_len,
        q_seq_id=q_seq_id,
        seq_lens=seq_lens,
        cu_kv_lens=cu_kv_lens,
        page_indices=page_indices,
    )
    batch, queries, heads, width = q.shape
    if kv.ndim == 3:
        geometry, source = flat_geometry(kv, read_block), flat_source(kv, queries)
    elif page_table is not None:
        geometry, source = paged_geometry(kv, read_block), paged_source(kv, page_table, seq_len, queries)
    else:
        geometry = paged_geometry(kv, read_block)
        source = ragged_source(kv, page_size, q_seq_id, seq_lens, cu_kv_lens, page_indices)
    out_shape = (batch, queries, heads, kv_lora_rank)
    if 0 in (*out_shape, *kv.shape, indices.shape[2], source.table.size):
        return jnp.zeros(out_shape, jnp.float32)
    chunks = split(indices.shape[2], block_units, geometry, kv.dtype)
    count = batch * queries
    selection = select(indices.reshape(count, -1), positions.reshape(count), source.lengths, geometry, chunks)
    plan = Plan(geometry, chunks, kv_lora_rank, float(sm_scale))
    return attend(plan, q.reshape(count, heads, width), source, selection, interpret).reshape(out_shape)
