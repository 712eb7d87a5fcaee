"""Calls of dense MLA that must be refused, each one step away from a good call."""

from collections.abc import Iterator

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.dense_mla.case import ARRAYS, METADATA, DenseCase

BadCall = tuple[str, str, Inputs]
"""What is wrong, the argument that the error must name, and the call."""

BAD_OPTIONS = {
    "sliding_window": (0, -3),
    "soft_cap": (0.0, -1.0, float("nan"), float("inf")),
    "chunk_prefill_size": (0, -1),
    "num_kv_pages_per_block": (0, -1),
    "num_queries_per_block": (0, -2),
    "vmem_limit_bytes": (0, -1),
    "sm_scale": (float("nan"), float("inf")),
    "q_scale": (float("nan"),),
    "k_scale": (float("inf"),),
    "v_scale": (float("nan"),),
}


def bad_static_calls(inputs: Inputs) -> Iterator[BadCall]:
    """Every wrong shape, dtype or option: refused while tracing."""
    for name, values in BAD_OPTIONS.items():
        for value in values:
            yield f"{name}={value}", name, inputs.with_options({name: value})
    for name, array in inputs.args.items():
        yield f"{name} of rank {array.ndim + 1}", name, inputs.with_arrays({name: array[None]})
    for name in METADATA:
        yield f"{name} int8", name, inputs.with_arrays({name: inputs.args[name].astype(np.int8)})
    yield from _bad_sizes(inputs)
    yield from _bad_caches(inputs)


def _bad_sizes(inputs: Inputs) -> Iterator[BadCall]:
    for name in ARRAYS[1:4]:
        longer = np.concatenate([inputs.args[name], inputs.args[name][:1]])
        yield f"{name} of T + 1 tokens", name, inputs.with_arrays({name: longer})
    for name in ARRAYS[2:4]:
        yield f"{name} too narrow", name, inputs.with_arrays({name: inputs.args[name][..., :-1]})
    q_pe = inputs.args["q_pe"]
    yield "q_pe of H + 1 heads", "q_pe", inputs.with_arrays({"q_pe": np.concatenate([q_pe, q_pe[:, :1]], axis=1)})
    other = "f32" if q_pe.dtype != np.float32 else "bf16"
    yield "q_pe of another dtype", "q_pe", inputs.with_arrays({"q_pe": np.zeros(q_pe.shape, bits.DTYPES[other])})
    for name in ("page_indices", "cu_q_lens", "distribution"):
        longer = np.append(inputs.args[name], np.int32(0))
        if name != "page_indices" or len(longer) % len(inputs.args["kv_lens"]):
            yield f"{name} one too long", name, inputs.with_arrays({name: longer})


def _bad_caches(inputs: Inputs) -> Iterator[BadCall]:
    for name in ARRAYS[4:]:
        cache = inputs.args[name]
        yield f"{name} too narrow", name, inputs.with_arrays({name: cache[..., :-1]})
        yield f"{name} int32", name, inputs.with_arrays({name: np.zeros(cache.shape, np.int32)})
        other = "f32" if cache.dtype != np.float32 else "bf16"
        yield f"{name} of another dtype", name, inputs.with_arrays({name: np.zeros(cache.shape, bits.DTYPES[other])})
        packed_wrong = np.concatenate([cache, cache], axis=2)
        yield f"{name} with another packing", name, inputs.with_arrays({name: packed_wrong})
    new = {name: np.zeros(inputs.args[name].shape, np.int32) for name in ARRAYS[2:6]}
    yield "an integer cache", "new_kv_c", inputs.with_arrays(new)


def bad_values(case: DenseCase, inputs: Inputs) -> Iterator[BadCall]:
    """Every wrong value in the index arrays: refused where they are known."""
    slots = case.config.sequences
    (i, j, n), q_lens, kv_lens = case.distribution, case.q_lens, case.kv_lens
    wrong = {"i > j": (j + 1, j, n), "j > n": (i, n + 1, n), "n > S": (i, j, slots + 1), "i < 0": (-1, j, n)}
    for what, distribution in wrong.items():
        yield f"distribution with {what}", "distribution", _with(inputs, "distribution", distribution)
    yield "cu_q_lens that starts at 1", "cu_q_lens", _with_value(inputs, "cu_q_lens", 0, 1)
    if n:
        last = n - 1
        yield "more queries than T", "cu_q_lens", _with_value(inputs, "cu_q_lens", n, case.config.tokens + 1)
        yield "an empty sequence", "cu_q_lens", _with_value(inputs, "cu_q_lens", n, inputs.args["cu_q_lens"][last])
        yield "kv_len below q_len", "kv_lens", _with_value(inputs, "kv_lens", last, q_lens[last] - 1)
        yield "kv_len past the table", "kv_lens", _with_value(inputs, "kv_lens", last, case.config.capacity + 1)
        used = last * case.config.pages_a_sequence + (kv_lens[last] - 1) // case.config.page_size
        for page in (-1, case.config.pool):
            yield f"used page {page}", "page_indices", _with_value(inputs, "page_indices", used, page)
    if n > 1 and j < n:
        writer = case.config.pages_a_sequence * (n - 2) + (kv_lens[n - 2] - 1) // case.config.page_size
        if (kv_lens[n - 2] - 1) % case.config.page_size == (kv_lens[n - 1] - 1) % case.config.page_size:
            page = inputs.args["page_indices"][writer]
            yield "a slot written twice", "page_indices", _with_value(inputs, "page_indices", used, page)
    if any(q_len != 1 for q_len in q_lens):
        first = next(s for s, q_len in enumerate(q_lens) if q_len != 1)
        decodes = (first + 1, max(j, first + 1), n)
        yield "a decode sequence with q_len > 1", "cu_q_lens", _with(inputs, "distribution", decodes)


def _with(inputs: Inputs, name: str, values: tuple[int, ...]) -> Inputs:
    return inputs.with_arrays({name: np.array(values, np.int32)})


def _with_value(inputs: Inputs, name: str, index: int, value: int) -> Inputs:
    changed = inputs.args[name].copy()
    changed[index] = value
    return inputs.with_arrays({name: changed})
