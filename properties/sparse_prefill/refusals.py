"""Calls of sparse prefill that must be refused, each one step away from a good call."""

from collections.abc import Iterator

import numpy as np

from properties.case import Inputs
from properties.sparse_prefill.case import RAGGED, PrefillConfig

BadCall = tuple[str, str, Inputs]
"""What is wrong, the argument that the error must name, and the call."""


def bad_calls(config: PrefillConfig, inputs: Inputs) -> Iterator[BadCall]:
    """Every wrong shape, dtype or option: refused while tracing."""
    yield from _bad_options(config, inputs)
    tokens = ("ql", "qpe", "kvc", "kpe", "topk_pages", "positions", "loc")
    for name in tokens:
        array = inputs.args[name]
        yield f"{name} of one rank less", name, inputs.with_arrays({name: array[0]})
        yield f"{name} of one token less", name, inputs.with_arrays({name: array[1:]})
    for name in ("ql", "qpe"):
        yield f"{name} of more heads", name, inputs.with_arrays({name: np.repeat(inputs.args[name], 2, axis=1)})
    for name in ("ql", "kvc"):
        yield f"{name} narrower than kv_lora_rank", name, inputs.with_arrays({name: inputs.args[name][..., 1:]})
    for name in ("qpe", "kpe"):
        yield f"{name} narrower than the other", name, inputs.with_arrays({name: inputs.args[name][..., 1:]})
    for name in ("topk_pages", "positions", "loc", *(RAGGED if config.ragged else ())):
        yield f"{name} float32", name, inputs.with_arrays({name: inputs.args[name].astype(np.float32)})
    cache = inputs.args["cache"]
    yield "cache of rank 3", "cache", inputs.with_arrays({"cache": cache[0]})
    yield "cache int32", "cache", inputs.with_arrays({"cache": np.zeros(cache.shape, np.int32)})
    yield "cache narrower than align(L + R, 128)", "cache", inputs.with_arrays({"cache": cache[..., :-1]})
    if config.ragged:
        for name in ("cu_q_lens", "cu_kv_lens"):
            longer = np.append(inputs.args[name], inputs.args[name][-1:])
            yield f"{name} of another length than [n + 1]", name, inputs.with_arrays({name: longer})


def _bad_options(config: PrefillConfig, inputs: Inputs) -> Iterator[BadCall]:
    for name, values in {
        "sm_scale": (float("nan"), float("inf")),
        "read_block": (0, -4, 2 * config.page_size, 3),
        "page_size": (0, config.page_size + 1, 2 * config.page_size),
        "kv_lora_rank": (0, config.width + 1),
    }.items():
        for value in values:
            yield f"{name}={value}", name, inputs.with_options({name: value})


def bad_locations(config: PrefillConfig, inputs: Inputs) -> Iterator[BadCall]:
    """Slots of the single-sequence form that no page table read from every page_size-th of them can express."""
    ps = config.page_size
    whole = np.arange(config.tokens, dtype=np.int32)
    inputs = inputs.with_arrays({"loc": whole})
    spoilt = {
        "a page entered at its second slot": whole + 1,
        "two tokens exchanged": np.concatenate([whole[1::-1], whole[2:]]),
        "a token in another page than its neighbours": np.where(whole == 1, whole + ps, whole),
        "slots in falling order": whole[::-1].copy(),
    }
    for what, loc in spoilt.items():
        yield what, "loc", inputs.with_arrays({"loc": loc})
