"""What must hold of every sparse prefill call, in the single-sequence form and the ragged one."""

import dataclasses

import numpy as np

from oracles import dense_mla, paging
from oracles.precision import Precision
from properties import bits
from properties.case import Inputs
from properties.sparse_prefill.case import PrefillCase
from properties.sparse_prefill.refusals import bad_calls, bad_locations
from properties.stations import Plan, compiles, differential
from properties.trial import Trial

SINGLE, RAGGED = "prefill_write_and_attend", "prefill_write_and_attend_ragged"


@differential("sparse_prefill", SINGLE, RAGGED, interpret=Plan(share=0.25), tpu_interpret=Plan(stride=4, share=0.03))
def test_equals_the_oracle(case: PrefillCase, trial: Trial) -> None:
    """The output lies within the oracle's bound, the cache is right bit by bit, and the inputs stay as they were."""
    inputs = trial.inputs()
    before = inputs.digest()
    judge(trial, inputs, trial.run(inputs))
    if inputs.digest() != before:
        trial.fail("cache", "an input was written")


@differential("sparse_prefill", SINGLE, RAGGED, interpret=Plan(stride=5, share=0.2))
def test_all_units_are_dense(case: PrefillCase, trial: Trial) -> None:
    """Listing every visible token gives what dense attention gives on the same contents."""
    config = case.config
    count = -(-config.capacity // config.read_block)
    units = (tuple(range(count)),) * case.owned + ((-1,) * count,) * (config.tokens - case.owned)
    full = dataclasses.replace(case, config=dataclasses.replace(config, topk=count), units=units)
    inputs = full.inputs()
    out, cache = trial.run(inputs)
    expected, bound = dense(full, inputs, cache)
    trial.judge(inputs, out, expected, bound, "every unit listed:")


@differential("sparse_prefill", SINGLE, RAGGED, interpret=Plan(stride=4, share=0.1))
def test_repeats_bit_by_bit(case: PrefillCase, trial: Trial) -> None:
    """The same call gives the same bits, and writing the same rows again changes none."""
    inputs = trial.inputs()
    out, cache = trial.run(inputs)
    again, same = trial.run(inputs.with_arrays({"cache": cache}))
    _, bound, _ = trial.expect(inputs)
    specified = np.isfinite(bound).all(axis=(1, 2))
    trial.same_bits(again[specified], out[specified], "value", "a second run of the same call")
    trial.same_bits(bits.unsigned_view(same), bits.unsigned_view(cache), "cache", "the cache written twice")


@differential("sparse_prefill", SINGLE, RAGGED, interpret=Plan(stride=3, share=0.01))
def test_bad_calls_are_refused(case: PrefillCase, trial: Trial) -> None:
    """Every wrong shape, dtype or option raises a ValueError that names the argument."""
    for what, argument, bad in bad_calls(case.config, trial.inputs()):
        trial.refused(bad, argument, what)


@differential("sparse_prefill", SINGLE, interpret=Plan(share=0.01))
def test_bad_slots_are_refused(case: PrefillCase, trial: Trial) -> None:
    """Where slots are known, the single-sequence form refuses those that its page table can't express."""
    if not case.config.ragged:
        for what, argument, bad in bad_locations(case.config, trial.inputs()):
            trial.refused_by_value(bad, argument, what)


test_compiles = compiles("sparse_prefill", SINGLE, RAGGED)


def judge(trial: Trial, inputs: Inputs, outputs: tuple[np.ndarray, ...], what: str = "") -> None:
    """Hold output and cache of a call against the oracle of `inputs`."""
    expected, bound, want = trial.expect(inputs)
    out, cache = outputs
    trial.judge(inputs, out, expected, bound, what)
    if out.dtype != np.float32:
        trial.fail("value", f"out: dtype {out.dtype}, wanted float32")
    trial.same_bits(bits.unsigned_view(cache), want, "cache", f"{what} cache".strip())


def dense(case: PrefillCase, inputs: Inputs, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expected output of dense attention and its bound, float64 [T, H, L] each, over the rows that stand in `cache`.

    The bound is inf for a token whose write was dropped: its output is unspecified.
    """
    config, args = case.config, inputs.args
    rank, rows = config.kv_lora_rank, cache.reshape(config.slots, -1)
    latent, rope = rows[:, :rank], rows[:, rank : config.width]
    paged = [np.pad(part, ((0, 0), (0, paging.align(part.shape[1], 128) - part.shape[1]))) for part in (latent, rope)]
    paged = [part.reshape(*cache.shape[:3], -1) for part in paged]
    taken = [s for s, q_len in enumerate(case.q_lens) if q_len]
    offsets, columns = case.page_offsets(), config.pages_a_sequence
    table = np.full((max(1, len(taken)), columns), -1, np.int64)
    for row, sequence in enumerate(taken):
        own = case.pages[offsets[sequence] : offsets[sequence + 1]]
        table[row, : len(own)] = own
    targets = np.zeros(config.tokens, np.int64)
    targets[: case.owned] = case.targets()
    kv_lens = np.zeros(len(table), np.int64)
    kv_lens[: len(taken)] = [case.kv_lens[s] for s in taken]
    cu_q_lens = np.concatenate([[0], np.cumsum([case.q_lens[s] for s in taken], dtype=np.int64), [0] * (not taken)])
    distribution = np.array([0, 0, len(taken)])
    precision = Precision.of(args["ql"].dtype, cache.dtype, np.float32)
    expected, bound, *_ = dense_mla.mla_ragged_paged_attention(
        args["ql"], args["qpe"], latent[targets], rope[targets], *paged, kv_lens, table.reshape(-1), cu_q_lens,
        distribution, sm_scale=config.sm_scale, precision=precision,
    )  # fmt: skip
    bound[np.asarray(case.dropped)] = np.inf
    return expected, bound
