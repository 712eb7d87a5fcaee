"""Dense multi-head latent attention (MLA) over ragged batches and a paged cache, as a Pallas TPU kernel."""

from kernels.dense_mla.attention import mla_ragged_paged_attention
from kernels.dense_mla.cache import update_kv_cache
from kernels.dense_mla.masking import DEFAULT_MASK_VALUE
from kernels.dense_mla.prepare import prepare_kv_inputs, prepare_outputs, prepare_q_inputs
from kernels.dense_mla.reference import ref_mla_ragged_paged_attention
from kernels.dense_mla.validation import dynamic_validate_inputs, static_validate_inputs

__all__ = [
    "DEFAULT_MASK_VALUE",
    "dynamic_validate_inputs",
    "mla_ragged_paged_attention",
    "prepare_kv_inputs",
    "prepare_outputs",
    "prepare_q_inputs",
    "ref_mla_ragged_paged_attention",
    "static_validate_inputs",
    "update_kv_cache",
]
