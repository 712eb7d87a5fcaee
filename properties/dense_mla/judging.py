"""What the oracle says of a dense MLA call, and what a failure says to a person."""

from typing import Any

import numpy as np

from oracles import dense_mla as oracle
from oracles.row import Row
from properties.case import Inputs
from properties.compare import Verdict
from properties.dense_mla.case import DenseCase
from properties.explain import likeliest_key
from properties.family import Expected

SPEED_OPTIONS = ("chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block")
"""Options that may not change a result: the oracle doesn't know them."""


def expect(inputs: Inputs) -> Expected:
    """Expected output and bound, float64 [T, H, L] each, and the bits of both caches."""
    return oracle.mla_ragged_paged_attention(**inputs.arrays, **_options(inputs))


def explain(case: DenseCase, inputs: Inputs, got: np.ndarray, verdict: Verdict) -> str:
    """Where the worst element lies, and which token, dropped or added, brings the oracle closest to what was got."""
    token, head, column = verdict.worst
    sequence = int(np.searchsorted(case.cu_q_lens(), token, side="right")) - 1
    query = token - int(case.cu_q_lens()[sequence])
    kv_len, q_len = case.kv_lens[sequence], case.q_lens[sequence]
    i, j, _ = case.distribution
    served = "decode" if sequence < i else "chunked prefill" if sequence < j else "mixed"
    where = f"query {query} (position {kv_len - q_len + query}, q_len {q_len}, kv_len {kv_len})"
    place = f"  worst element  sequence {sequence} ({served}), {where}, head {head}, column {column}"
    return place + likeliest_key(row_of(inputs, token), got[token])


def row_of(inputs: Inputs, token: int) -> Row:
    """The query of `token` with every key that it could have read."""
    return oracle.row(token, **inputs.arrays, **_options(inputs))


def _options(inputs: Inputs) -> dict[str, Any]:
    return {name: value for name, value in inputs.options.items() if name not in SPEED_OPTIONS}
