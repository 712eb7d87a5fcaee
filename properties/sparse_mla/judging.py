"""What the oracle says of a sparse MLA call, and what a failure says to a person."""

from typing import Any

import numpy as np

from oracles import sparse_mla as oracle
from oracles.row import Row
from properties.case import Inputs
from properties.compare import Verdict
from properties.explain import likeliest_key
from properties.family import Expected
from properties.sparse_mla.case import SparseCase

SPEED_OPTIONS = ("block_units",)
"""Options that may not change a result: the oracle doesn't know them."""


def expect(inputs: Inputs) -> Expected:
    """Expected output and bound, float64 [B, S, H, kv_lora_rank] each."""
    return oracle.sparse_mla_attention(**inputs.arrays, **_options(inputs))


def explain(case: SparseCase, inputs: Inputs, got: np.ndarray, verdict: Verdict) -> str:
    """Where the worst element lies, and which token, dropped or added, brings the oracle closest to what was got."""
    b, s, head, column = verdict.worst
    row = b * case.config.queries + s
    request = f"request {case.q_seq_id[row]}" if case.q_seq_id else f"batch row {b}"
    query = f"query {s} (position {case.positions[row]}, kv_len {case.lengths()[row]})"
    place = f"  worst element  {request}, {query}, head {head}, column {column}"
    return place + likeliest_key(row_of(inputs, row), got[b, s])


def row_of(inputs: Inputs, query: int) -> Row:
    """Query number `query` of all batch rows with every key that it could have read."""
    b, s = divmod(query, inputs.args["q"].shape[1])
    return oracle.row(b, s, **inputs.arrays, **_options(inputs))


def _options(inputs: Inputs) -> dict[str, Any]:
    return {name: value for name, value in inputs.options.items() if name not in SPEED_OPTIONS}
