"""What the oracles say of a step's batch, and what a failure says to a person."""

import numpy as np

from properties.case import Inputs
from properties.compare import Verdict
from properties.dense_mla import judging as dense
from properties.explain import likeliest_key
from properties.family import Expected
from properties.serving.case import ServingCase
from properties.sparse_mla import judging as sparse
from properties.sparse_prefill import judging as prefill

_JUDGES = {
    "mla_ragged_paged_attention": dense,
    "sparse_mla_attention": sparse,
    "prefill_write_and_attend_ragged": prefill,
}


def expect(inputs: Inputs) -> Expected:
    """What the oracle of the entry point says."""
    return _JUDGES[inputs.entry].expect(inputs)


def explain(case: ServingCase, inputs: Inputs, got: np.ndarray, verdict: Verdict) -> str:
    """Which request's token is worst in the last step's batch, and which key would explain it."""
    token, head, column = verdict.worst[-3:]
    step = case.steps[-1]
    ends = np.cumsum(step.lengths)
    if token >= ends[-1]:
        return f"  worst element  padded token {token}, head {head}, column {column}"
    entry = int(np.searchsorted(ends, token, side="right"))
    query = f"token {token - ends[entry] + step.lengths[entry]} of {step.lengths[entry]}"
    place = f"  worst element  r{step.requests[entry]}, {query} in this step, head {head}, column {column}"
    return place + likeliest_key(_JUDGES[inputs.entry].row_of(inputs, token), got.reshape(-1, *got.shape[-2:])[token])
