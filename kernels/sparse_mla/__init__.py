"""Sparse MLA (DSA): attend only the units of tokens that an indexer picked, from flat, paged or packed ragged keys."""

from kernels.sparse_mla.attention import sparse_mla_attention
from kernels.sparse_mla.units import flat_to_paged_cache, units_to_token_ids

__all__ = [
    "flat_to_paged_cache",
    "sparse_mla_attention",
    "units_to_token_ids",
]
