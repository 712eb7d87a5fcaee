"""Prefill: write the new tokens' rows into a paged cache, then attend to it."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.layout import cdiv
from kernels.sparse_mla.attention import sparse_mla_attention
from kernels.sparse_mla.cache import write_rows
from kernels.sparse_mla.validation import validate_locations, validate_prefill, validate_requests

_KEYS_A_CHUNK = 1024


def prefill_write_and_attend(
    ql: jax.Array,
    qpe: jax.Array,
    kvc: jax.Array,
    kpe: jax.Array,
    cache: jax.Array,
    topk_pages: jax.Array,
    positions: jax.Array,
    loc: jax.Array,
    *,
    kv_lora_rank: int,
    page_size: int,
    sm_scale: float,
    read_block: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write one request's tokens, prefilled from position 0, and attend to the written cache.

    The row [latent | rope | zeros] of token t goes to slot loc[t] of the cache; then each token attends the units
    that it lists, as `sparse_mla_attention` says, over a sequence of T tokens.

    Token t of the request is row t. Logical page p lies in physical page loc[p * page_size] // page_size, so the
    request starts at position 0, has no cached prefix, and its tokens fill their pages in order; what differs needs
    `prefill_write_and_attend_ragged`. When `loc` is concrete it is checked; under jit a page whose first token is
    padding must not be listed by any token.

    Args:
      ql: absorbed queries [T, H, kv_lora_rank], float32 or bfloat16, which all float arguments share.
      qpe: rotary queries [T, H, R].
      kvc: latent rows [T, kv_lora_rank].
      kpe: rope rows [T, R].
      cache: [N, page_size / packing, packing, align(kv_lora_rank + R, 128)]. Not donated: the one returned is written.
      topk_pages: [T, K] int32 unit ids of each token; negative ones are padding.
      positions: [T] int32 absolute positions.
      loc: [T] int32 physical slots, page * page_size + token in page, no two alike. A negative one, or one past the
        end of the cache, marks a padded token: its row is dropped, its output is 0.
      kv_lora_rank: latent width.
      page_size: tokens a page.
      sm_scale: factor of the scores, a Python number.
      read_block: tokens a unit, a divisor of page_size; None for a page.
      interpret: as `pl.pallas_call` takes it.

    Returns:
      (out, cache): [T, H, kv_lora_rank] float32, and the written cache.

    Raises:
      ValueError: shapes, dtypes or options don't fit together, or a concrete `loc` is not of the form above.
    """
    read_block = page_size if read_block is None else read_block
    options = {"kv_lora_rank": kv_lora_rank, "page_size": page_size, "sm_scale": sm_scale, "read_block": read_block}
    validate_prefill(ql, qpe, kvc, kpe, cache, topk_pages, positions, loc, **options)
    validate_locations(loc, cache.shape[0], page_size)
    table = jnp.clip(loc[::page_size] // page_size, 0, max(cache.shape[0] - 1, 0))
    source = {"page_table": table[None], "seq_len": loc.shape[0]}
    return _write_and_attend(ql, qpe, kvc, kpe, cache, topk_pages, positions, loc, source, options, interpret)


def prefill_write_and_attend_ragged(
    ql: jax.Array,
    qpe: jax.Array,
    kvc: jax.Array,
    kpe: jax.Array,
    cache: jax.Array,
    topk_pages: jax.Array,
    positions: jax.Array,
    loc: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    page_indices: jax.Array,
    *,
    kv_lora_rank: int,
    page_size: int,
    sm_scale: float,
    read_block: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the tokens of many requests, each behind a cached prefix or none, and attend to the written cache.

    Args and results are those of `prefill_write_and_attend`, with unit ids and positions local to a token's request,
    `loc` free to name any slot, and:
      seq_lens: [n] int32 length of each request, its new tokens included.
      cu_q_lens: [n + 1] int32; request r owns the tokens from cu_q_lens[r] up to cu_q_lens[r + 1], perhaps none.
        Tokens at or past cu_q_lens[n] belong to no request: their output is 0.
      cu_kv_lens: [n + 1] int32, page-aligned: request r's pages are page_indices[cu_kv_lens[r] // page_size :].
      page_indices: int32 physical pages of all requests; entries that no listed unit uses may hold anything.

    Raises:
      ValueError: shapes, dtypes or options don't fit together.
    """
    read_block = page_size if read_block is None else read_block
    options = {"kv_lora_rank": kv_lora_rank, "page_size": page_size, "sm_scale": sm_scale, "read_block": read_block}
    validate_prefill(ql, qpe, kvc, kpe, cache, topk_pages, positions, loc, **options)
    validate_requests(seq_lens, cu_q_lens, cu_kv_lens, page_indices)
    token = jnp.arange(loc.shape[0], dtype=jnp.int32)
    # Each request that ends at or before a token lies before it, empty ones too.
    request = jnp.sum(cu_q_lens[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    source = {"q_seq_id": request, "seq_lens": seq_lens, "cu_kv_lens": cu_kv_lens, "page_indices": page_indices}
    return _write_and_attend(ql, qpe, kvc, kpe, cache, topk_pages, positions, loc, source, options, interpret)


def _write_and_attend(
    ql: jax.Array,
    qpe: jax.Array,
    kvc: jax.Array,
    kpe: jax.Array,
    cache: jax.Array,
    topk_pages: jax.Array,
    positions: jax.Array,
    loc: jax.Array,
    source: dict[str, Any],
    options: dict[str, Any],
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    rows = jnp.concatenate([kvc, kpe], axis=1)
    cache = write_rows(cache, jnp.pad(rows, ((0, 0), (0, cache.shape[-1] - rows.shape[1]))), loc)
    written = (loc >= 0) & (loc < cache.shape[0] * options["page_size"])
    out = sparse_mla_attention(
        jnp.concatenate([ql, qpe], axis=2)[None],
        cache,
        jnp.where(written[:, None], topk_pages, -1)[None],
        positions[None],
        block_units=cdiv(_KEYS_A_CHUNK, options["read_block"]),
        interpret=interpret,
        **source,
        **options,
    )
    return out[0], cache
