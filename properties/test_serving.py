"""What must hold of every sequence of steps that a serving engine drives the kernels through."""

from properties.serving.case import ServingCase
from properties.serving.serve import serve
from properties.stations import Plan, differential
from properties.trial import Trial


@differential(
    "serving", "mla_ragged_paged_attention", interpret=Plan(share=0.5), tpu_interpret=Plan(stride=2, share=0.02)
)
def test_serving_matches_the_model(case: ServingCase, trial: Trial) -> None:
    """After each step outputs lie within the bound of the oracle on each request's contiguous history, the pool is the
    model's bit by bit, and no page has two owners.
    """
    serve(case, trial)


@differential(
    "serving_sparse",
    "prefill_write_and_attend_ragged",
    "sparse_mla_attention",
    interpret=Plan(share=0.5),
    tpu_interpret=Plan(stride=2, share=0.02),
)
def test_sparse_serving_matches_the_model(case: ServingCase, trial: Trial) -> None:
    """The same over sparse prefill and sparse attention."""
    serve(case, trial)
