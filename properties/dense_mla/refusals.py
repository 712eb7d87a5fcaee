"""Calls of dense MLA that must be refused, each one step away from a good call."""

import itertools
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
    """Every wrong shape, dtype or option of an attention call: refused while tracing."""
    for name, values in BAD_OPTIONS.items():
        for value in values:
            yield f"{name}={value}", name, inputs.with_options({name: value})
    for name in ARRAYS[:2]:
        yield from _bad_ranks(inputs, name)
    yield from _bad_sizes(inputs)
    yield from bad_cache_writes(inputs)


def bad_cache_writes(inputs: Inputs) -> Iterator[BadCall]:
    """The wrong shapes and dtypes that update_kv_cache refuses too."""
    for name in (*ARRAYS[2:], *METADATA):
        yield from _bad_ranks(inputs, name)
    yield from _bad_metadata(inputs)
    yield from _bad_caches(inputs)


def _bad_ranks(inputs: Inputs, name: str) -> Iterator[BadCall]:
    array = inputs.args[name]
    yield f"{name} of rank {array.ndim + 1}", name, inputs.with_arrays({name: array[None]})
    yield f"{name} of rank {array.ndim - 1}", name, inputs.with_arrays({name: array[0]})


def _bad_metadata(inputs: Inputs) -> Iterator[BadCall]:
    for name in METADATA:
        yield f"{name} int8", name, inputs.with_arrays({name: inputs.args[name].astype(np.int8)})
    for name in METADATA[1:]:
        longer = np.append(inputs.args[name], np.int32(0))
        if name != "page_indices" or len(longer) % len(inputs.args["kv_lens"]):
            yield f"{name} one too long", name, inputs.with_arrays({name: longer})


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
    slots, (i, j, n) = case.config.sequences, case.distribution
    wrong = {"i > j": (j + 1, j, n), "j > n": (i, n + 1, n), "n > S": (i, j, slots + 1), "i < 0": (-1, j, n)}
    for what, distribution in wrong.items():
        yield f"distribution with {what}", "distribution", _with(inputs, "distribution", distribution)
    yield "cu_q_lens that starts at 1", "cu_q_lens", _with_value(inputs, "cu_q_lens", 0, 1)
    if n:
        yield from _bad_lengths(case, inputs)
        yield from _bad_pages(case, inputs)
        yield from _bad_ranges(case, inputs)


def _bad_lengths(case: DenseCase, inputs: Inputs) -> Iterator[BadCall]:
    """Of the first and of the last active sequence."""
    config, n = case.config, case.active
    yield "more queries than T", "cu_q_lens", _with_value(inputs, "cu_q_lens", n, config.tokens + 1)
    for s in {0, n - 1}:
        start = int(inputs.args["cu_q_lens"][s])
        yield f"sequence {s} empty", "cu_q_lens", _with_value(inputs, "cu_q_lens", s + 1, start)
        yield f"cu_q_lens that falls at {s + 1}", "cu_q_lens", _with_value(inputs, "cu_q_lens", s + 1, start - 1)
        for kv_len in (case.q_lens[s] - 1, 0, -1, config.capacity + 1, 2**31 - 1):
            if kv_len < case.q_lens[s] or kv_len > config.capacity:
                yield f"kv_len {kv_len}", "kv_lens", _with_value(inputs, "kv_lens", s, kv_len)


def _bad_pages(case: DenseCase, inputs: Inputs) -> Iterator[BadCall]:
    """A page outside the cache, in the first and the last used column; and a slot that two tokens write."""
    config, table = case.config, inputs.args["page_indices"]
    last = [s * config.pages_a_sequence + (kv_len - 1) // config.page_size for s, kv_len in enumerate(case.kv_lens)]
    for column in (0, last[-1]):
        for page in (-1, config.pool, 2**31 - 1):
            what = f"page {page} in entry {column}"
            yield what, "page_indices", _with_value(inputs, "page_indices", column, page)
    final = [(kv_len - 1) % config.page_size for kv_len in case.kv_lens]
    pairs = itertools.combinations(range(case.active), 2)
    for one, other in [(a, b) for a, b in pairs if final[a] == final[b]][:1]:
        page = int(table[last[one]])
        yield "a slot written twice", "page_indices", _with_value(inputs, "page_indices", last[other], page)


def _bad_ranges(case: DenseCase, inputs: Inputs) -> Iterator[BadCall]:
    """A sequence listed in a range of the distribution that its q_len doesn't fit."""
    (_, j, n), q_lens, chunk = case.distribution, case.q_lens, case.config.chunk_prefill_size
    longer = [s for s in range(n) if q_lens[s] != 1]
    if longer:
        decodes = (longer[0] + 1, max(j, longer[0] + 1), n)
        yield "a decode sequence with q_len > 1", "distribution", _with(inputs, "distribution", decodes)
    others = [s for s in range(n) if q_lens[s] != chunk]
    if chunk and others:
        ranges = (0, others[0] + 1, n)
        yield "a chunk of another size", "chunk_prefill_size", _with(inputs, "distribution", ranges)


def _with(inputs: Inputs, name: str, values: tuple[int, ...]) -> Inputs:
    return inputs.with_arrays({name: np.array(values, np.int32)})


def _with_value(inputs: Inputs, name: str, index: int, value: int) -> Inputs:
    changed = inputs.args[name].copy()
    changed[index] = value
    return inputs.with_arrays({name: changed})
