"""Calls of sparse MLA that must be refused, each one step away from a good call."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.sparse_mla.case import SparseConfig

BadCall = tuple[str, str, Inputs]
"""What is wrong, the argument that the error must name, and the call."""


def bad_calls(config: SparseConfig, inputs: Inputs) -> Iterator[BadCall]:
    """Every way in which `inputs`, a good call of `config`, can be spoilt."""
    yield from _bad_options(config, inputs)
    yield from _bad_arrays(config, inputs)
    if config.source == "ragged":
        yield from _bad_ragged(inputs)
    if config.source != "flat":
        yield from _bad_pages(config, inputs)


def _bad_options(config: SparseConfig, inputs: Inputs) -> Iterator[BadCall]:
    for name, values in {
        "sm_scale": (None, float("nan"), float("inf")),
        "block_units": (None, 0, -1),
        "read_block": (0, -4),
        "kv_lora_rank": (0, config.width + 1),
    }.items():
        for value in values:
            yield f"{name}={value}", name, inputs.with_options({name: value})


def _bad_arrays(config: SparseConfig, inputs: Inputs) -> Iterator[BadCall]:
    q, kv, indices, positions = (inputs.args[name] for name in ("q", "kv", "indices", "positions"))
    for name, array in (("q", q), ("kv", kv), ("indices", indices), ("positions", positions)):
        yield f"{name} of rank {array.ndim - 1}", name, inputs.with_arrays({name: array[0]})
    for name, array in (("indices", indices), ("positions", positions)):
        yield f"{name} float32", name, inputs.with_arrays({name: array.astype(np.float32)})
    yield "q int32", "q", inputs.with_arrays({"q": q.astype(np.int32)})
    yield "kv int32", "kv", inputs.with_arrays({"kv": np.zeros(kv.shape, np.int32)})
    other = bits.DTYPES["f32" if config.dtype == "bf16" else "bf16"]
    yield "kv in another float than q", "kv", inputs.with_arrays({"kv": np.zeros(kv.shape, other)})
    for name, array in (("indices", indices), ("positions", positions)):
        yield f"{name} for one query more", name, inputs.with_arrays({name: np.repeat(array, 2, axis=1)})
    if config.source == "flat":
        yield "kv for one batch row more", "kv", inputs.with_arrays({"kv": np.concatenate([kv, kv[:1]])})
        yield "kv wider than q", "kv", inputs.with_arrays({"kv": np.concatenate([kv, kv[..., :1]], axis=-1)})


def _bad_ragged(inputs: Inputs) -> Iterator[BadCall]:
    for name in ("seq_lens", "cu_kv_lens", "page_indices"):
        yield f"ragged without {name}", name, inputs.without(name)
    twice: dict[str, Any] = {name: np.concatenate([inputs.args[name]] * 2) for name in ("q", "indices", "positions")}
    yield "ragged with B 2", "q", inputs.with_arrays(twice)
    longer = np.append(inputs.kwargs["cu_kv_lens"], inputs.kwargs["cu_kv_lens"][-1:])
    yield "cu_kv_lens of another length than [n + 1]", "cu_kv_lens", inputs.with_arrays({"cu_kv_lens": longer})
    owners = inputs.kwargs["q_seq_id"]
    yield "q_seq_id for one query more", "q_seq_id", inputs.with_arrays({"q_seq_id": np.append(owners, owners[-1:])})
    for name, array in inputs.kwargs.items():
        yield f"{name} float32", name, inputs.with_arrays({name: array.astype(np.float32)})
        yield f"{name} of rank 2", name, inputs.with_arrays({name: array[None]})


def _bad_pages(config: SparseConfig, inputs: Inputs) -> Iterator[BadCall]:
    kv = inputs.args["kv"]
    yield "paged without page_size", "page_size", inputs.with_options({"page_size": None})
    yield "kv narrower than align(Dk, 128)", "kv", inputs.with_arrays({"kv": kv[..., :-1]})
    for read_block in (config.page_size * 2, config.page_size - 1):
        wrong = inputs.with_options({"read_block": read_block})
        yield f"read_block {read_block} with pages of {config.page_size}", "read_block", wrong
    halved = {"page_size": config.page_size // 2, "read_block": 1}
    yield "page_size half of kv's", "page_size", inputs.with_options(halved)
    if kv.shape[2] > 1:
        odd = {"page_size": config.page_size + 1}
        yield "page_size no multiple of the packing", "page_size", inputs.with_options(odd)
    if config.source == "paged":
        yield "paged without seq_len", "seq_len", inputs.with_options({"seq_len": None})
        table = inputs.kwargs["page_table"]
        yield "page_table of rank 1", "page_table", inputs.with_arrays({"page_table": table[0]})
        yield "page_table int8", "page_table", inputs.with_arrays({"page_table": table.astype(np.int8)})
        longer = np.append(table, table[:1], axis=0)
        yield "page_table for one row more", "page_table", inputs.with_arrays({"page_table": longer})
