"""Sparse multi-head latent attention (MLA) over selected units of tokens, as a Pallas TPU kernel."""

from kernels.sparse_mla.attention import sparse_mla_attention
from kernels.sparse_mla.layout import flat_to_paged_cache, units_to_token_ids
from kernels.sparse_mla.prefill import prefill_write_and_attend, prefill_write_and_attend_ragged

__all__ = [
    "flat_to_paged_cache",
    "prefill_write_and_attend",
    "prefill_write_and_attend_ragged",
    "sparse_mla_attention",
    "units_to_token_ids",
]
