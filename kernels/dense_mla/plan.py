"""Everything about a call that the compiled kernel is specialised to."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels.dense_mla.blocks import (
    default_num_kv_pages_per_block,
    default_num_queries_per_block,
    even_queries_per_block,
)
from kernels.dense_mla.masking import DEFAULT_MASK_VALUE, masked_keys_are_weightless
from kernels.layout import LANES, SUBLANES, align, cdiv, packing


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `mla_ragged_paged_attention`, as given."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    chunk_prefill_size: int | None
    num_kv_pages_per_block: int | None
    num_queries_per_block: int | None
    vmem_limit_bytes: int | None
    debug_mode: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes and options of one compiled kernel."""

    num_tokens: int
    """T."""
    num_heads: int
    """H, padded to whole tiles of the queries' dtype."""
    latent_width: int
    """L, padded to whole lanes."""
    rope_width: int
    """R, padded to whole lanes."""
    page_size: int
    """Tokens a page."""
    packing: int
    """Tokens that share a 32-bit sublane of the cache."""
    num_seqs: int
    """S."""
    pages_per_seq: int
    """W."""
    queries_per_block: int
    """Queries computed together in a prefill or mixed sequence."""
    chunk_queries_per_block: int
    """The same in a sequence of the chunked-prefill range."""
    pages_per_block: int
    """Pages of keys computed together."""
    q_dtype: DTypeLike
    kv_dtype: DTypeLike
    dot_dtype: DTypeLike
    """Of the dots' inputs: bfloat16, which holds narrower caches exactly, unless a float32 input would lose by it."""
    score_scale: float
    """sm_scale * q_scale * k_scale."""
    value_scale: float
    """v_scale."""
    soft_cap: float | None
    window: int | None
    """Keys that a query sees back, itself included; None where that is every key."""
    mask_value: float
    masked_keys_count: bool
    """Whether masked keys below kv_len keep a softmax weight, so that none of them may be left out."""
    vmem_limit_bytes: int | None
    debug: bool

    @property
    def width(self) -> int:
        """Columns of a query or key: latent, then rope."""
        return self.latent_width + self.rope_width

    @property
    def keys_per_block(self) -> int:
        """Keys computed together."""
        return self.pages_per_block * self.page_size

    @property
    def sum_lanes(self) -> int:
        """Lanes that the softmax denominator is spread over until the last block."""
        return LANES if self.keys_per_block % LANES == 0 else self.keys_per_block

    @property
    def max_queries_per_block(self) -> int:
        """Queries that a buffer holds."""
        return max(self.queries_per_block, self.chunk_queries_per_block)

    @property
    def name(self) -> str:
        """Label of the kernel in profiles."""
        chunk = self.chunk_queries_per_block
        return f"dense_mla-bq_{self.queries_per_block}-bqc_{chunk}-bkp_{self.pages_per_block}-p_{self.page_size}"


def make_plan(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    cache_kv_c: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    options: Options,
) -> Plan:
    """Derive a call's plan from its validated arguments."""
    num_tokens, heads, latent = ql_nope.shape
    num_heads = align(heads, SUBLANES * packing(ql_nope.dtype))
    page_size = cache_kv_c.shape[1] * cache_kv_c.shape[2]
    pages_per_seq = page_indices.shape[0] // kv_lens.shape[0]
    q_dtype, kv_dtype = jnp.dtype(ql_nope.dtype), jnp.dtype(cache_kv_c.dtype)
    dot_dtype = jnp.dtype(jnp.float32 if jnp.float32 in (q_dtype, kv_dtype) else jnp.bfloat16)
    default_queries = default_num_queries_per_block(num_tokens, num_heads, dot_dtype)
    queries = min(options.num_queries_per_block or default_queries, num_tokens)
    chunk = options.chunk_prefill_size
    default_pages = default_num_kv_pages_per_block(page_size, pages_per_seq, dot_dtype)
    pages = min(options.num_kv_pages_per_block or default_pages, pages_per_seq)
    # The keys of a block fill whole tiles of the cache's dtype.
    pages = max(pages, cdiv(SUBLANES * packing(cache_kv_c.dtype), page_size))
    window = options.sliding_window
    mask_value = DEFAULT_MASK_VALUE if options.mask_value is None else float(options.mask_value)
    soft_cap = None if options.soft_cap is None else float(options.soft_cap)
    weightless = masked_keys_are_weightless(mask_value, soft_cap)
    q_scale, k_scale, v_scale = (1.0 if x is None else x for x in (options.q_scale, options.k_scale, options.v_scale))
    return Plan(
        num_tokens=num_tokens,
        num_heads=num_heads,
        latent_width=align(latent, LANES),
        rope_width=align(q_pe.shape[2], LANES),
        page_size=page_size,
        packing=cache_kv_c.shape[2],
        num_seqs=kv_lens.shape[0],
        pages_per_seq=pages_per_seq,
        queries_per_block=queries,
        chunk_queries_per_block=queries if chunk is None else even_queries_per_block(chunk, queries),
        pages_per_block=pages,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        dot_dtype=dot_dtype,
        score_scale=float(options.sm_scale) * float(q_scale) * float(k_scale),
        value_scale=float(v_scale),
        soft_cap=soft_cap,
        window=None if window is None or window >= pages_per_seq * page_size else int(window),
        mask_value=DEFAULT_MASK_VALUE if weightless else mask_value,
        masked_keys_count=not weightless,
        vmem_limit_bytes=options.vmem_limit_bytes,
        debug=options.debug_mode,
    )
