"""What the oracle says of a sparse prefill call, and what a failure says to a person."""

import numpy as np

from oracles import sparse_mla as oracle
from oracles.row import Row
from properties.case import Inputs
from properties.compare import Verdict
from properties.explain import likeliest_key
from properties.family import Expected
from properties.sparse_prefill.case import PrefillCase


def expect(inputs: Inputs) -> Expected:
    """Expected output and bound, float64 [T, H, L] each, and the bits of the cache."""
    return getattr(oracle, inputs.entry)(*inputs.args.values(), **inputs.options)


def explain(case: PrefillCase, inputs: Inputs, got: np.ndarray, verdict: Verdict) -> str:
    """Where the worst element lies, and which token, dropped or added, brings the oracle closest to what was got."""
    token, head, column = verdict.worst
    if token >= case.owned:
        return f"  worst element  padded token {token}, head {head}, column {column}"
    request = case.sequences()[token]
    query = f"token {token} (position {case.positions()[token]}, kv_len {case.kv_lens[request]})"
    place = f"  worst element  request {request}, {query}, head {head}, column {column}"
    return place + likeliest_key(row_of(inputs, token), got[token])


def row_of(inputs: Inputs, token: int) -> Row:
    """The query of `token` with every key that it could have read."""
    return oracle.row(0, token, **oracle.as_sparse_call(*inputs.args.values(), **inputs.options))
