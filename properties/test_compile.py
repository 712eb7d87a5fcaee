"""The compile backend itself: what a TPU can't hold is a finding with the compiler's words, never a crash."""

import pytest

from properties import aot, dense_mla, subjects


def test_a_kernel_too_large_for_vmem_is_a_clear_error() -> None:
    """A kernel that needs more VMEM than it may take is refused by name."""
    inputs = dense_mla.FAMILY.menu[0].abstract().with_options({"vmem_limit_bytes": 4096})
    with pytest.raises(aot.CompileError, match=r"(?i)vmem"):
        aot.compile_for(subjects.load("dense_mla").function(inputs.entry), inputs, "v5e")
