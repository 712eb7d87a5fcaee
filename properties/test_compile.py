"""The compile backend itself: what a TPU can't hold is a finding with the compiler's words, never a crash."""

import dataclasses

import pytest

from properties import aot, sparse_mla, subjects


@pytest.mark.parametrize("target", aot.TARGETS)
def test_a_kernel_too_large_for_vmem_is_a_clear_error(target: str) -> None:
    """Buffers of more than the chip's VMEM are refused by name."""
    paged = next(config for config in sparse_mla.FAMILY.serving_menu if config.source == "paged" and config.heads == 128)
    config = dataclasses.replace(paged, read_block=64, topk=2048, block_units=2048)
    inputs = config.abstract()
    function = subjects.load("sparse_mla").function(inputs.entry)
    with pytest.raises(aot.CompileError, match=r"(?i)vmem"):
        aot.compile_for(function, inputs, target)
