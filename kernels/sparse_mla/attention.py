"""The public entry: validate, find the listed units in their source, attend."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.layout import LANES, SUBLANES, align, packing
from kernels.sparse_mla.copies import flat_tail
from kernels.sparse_mla.gather import Fetch, gather
from kernels.sparse_mla.kernel import Plan, attend
from kernels.sparse_mla.validation import validate


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
    """Attend the tokens of the units that each query lists (DeepSeek sparse attention over absorbed MLA).

    Unit u is the tokens [u * read_block, (u + 1) * read_block) of the query's sequence. Token t counts once for each time
    its unit is listed, if t <= position and t < the sequence's length:
    out = sum_t softmax_t(sm_scale * q . kv_t) * kv_t[:kv_lora_rank]. A query without a token gets exactly 0. Scores,
    softmax and sums are float32; weights are rounded to kv's dtype for the value product.

    Args:
      q: absorbed latent queries [B, S, H, Dk], bfloat16 or float32, Dk = kv_lora_rank + rope.
      kv: keys of q's dtype: flat [B, T, Dk], or paged [N, page_size / packing, packing, align(Dk, 128)]. Whatever no
        query attends may hold NaN.
      indices: [B, S, K] int32 unit ids; negative is padding, anywhere; an id past the last unit names no token.
      positions: [B, S] int32, the absolute position of each query.
      kv_lora_rank: columns of a value, the first ones of a key.
      read_block: tokens a unit; divides page_size when paged.
      block_units: units gathered a step; a chunk is rounded up to whole tiles. Changes speed only.
      sm_scale: factor of the scores, a Python number.
      interpret: False to compile, True or InterpretParams to interpret, as pallas_call takes it.
      page_table: [B, ceil(seq_len / page_size)] int32, paged. Entries that no listed unit needs may hold anything.
      page_size: tokens a page.
      seq_len: length of every row's sequence, paged.
      q_seq_id: [S] int32, the request of each query, packed ragged (B = 1).
      seq_lens: [n] int32, the length of each request.
      cu_kv_lens: [n + 1] int32, page-aligned: request r's pages are page_indices[cu_kv_lens[r] // page_size :].
      page_indices: [pages] int32.

    Returns:
      [B, S, H, kv_lora_rank] float32.

    Raises:
      ValueError: an option or a shape doesn't fit; everything checked is static, so it is raised while tracing too.
    """
    validate(
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
    count = batch * queries
    if 0 in (count, heads, kv.size, indices.shape[2]):
        return jnp.zeros((batch, queries, heads, kv_lora_rank), jnp.float32)
    units, position = indices.reshape(count, -1), positions.reshape(count)
    batch_row = jnp.arange(count, dtype=jnp.int32)[:, None] // queries
    fetch = Fetch.of(kv, read_block, block_units)

    def in_pages(page_of: jax.Array, first_entry: jax.Array, units: jax.Array) -> jax.Array:
        """The packed row at which a unit starts, with pages listed in `page_of` from `first_entry` on."""
        token = units * read_block
        page = page_of[jnp.minimum(first_entry + token // page_size, page_of.shape[0] - 1)]
        return page * (page_size // fetch.packing) + token % page_size // fetch.packing

    if q_seq_id is not None:
        last = jnp.minimum(position, seq_lens[q_seq_id] - 1)
        first_entry = (cu_kv_lens[q_seq_id] // page_size)[:, None]
        gathered = gather(units, last, lambda units: in_pages(page_indices, first_entry, units), fetch)
    elif page_table is not None:
        last, first_entry = jnp.minimum(position, seq_len - 1), batch_row * page_table.shape[1]
        table = page_table.reshape(-1)
        gathered = gather(units, last, lambda units: in_pages(table, first_entry, units), fetch)
    else:
        last = jnp.minimum(position, kv.shape[1] - 1)
        gathered = gather(units, last, lambda units: units * read_block // fetch.granule, fetch)
    if fetch.paged:
        sources = [kv.reshape(-1, *kv.shape[2:])]
    else:
        sources = _flat_sources(kv, fetch.granule)
    heads_padded = align(heads, SUBLANES * packing(q.dtype))
    key_width = sources[0].shape[-1]
    value_width = min(align(kv_lora_rank, LANES), key_width)
    rows = jnp.pad(q.reshape(count, heads, width), ((0, 0), (0, heads_padded - heads), (0, key_width - width)))
    plan = Plan(fetch, queries, gathered.visible.shape[1], value_width, float(sm_scale))
    out = attend(plan, rows, sources, gathered, interpret)
    return out[:, :heads, :kv_lora_rank].reshape(batch, queries, heads, kv_lora_rank)


def _flat_sources(kv: jax.Array, granule: int) -> list[jax.Array]:
    """A flat KV, and its tail where the rows don't fill the last granule; padded only when shorter than one."""
    if kv.shape[1] < granule:
        return [jnp.pad(kv, ((0, 0), (0, granule - kv.shape[1]), (0, 0)))]
    tail = flat_tail(kv, granule)
    return [kv] if tail is None else [kv, tail]
