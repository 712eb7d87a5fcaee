"""What must hold of every dense MLA call."""

import dataclasses

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.dense_mla.case import DenseCase
from properties.dense_mla.refusals import bad_cache_writes, bad_static_calls, bad_values
from properties.dense_mla.strategies import LONG, WIDE
from properties.stations import Plan, compiles, differential
from properties.trial import Trial

ATTENTION = "mla_ragged_paged_attention"
CACHES = ("cache_kv_c", "cache_k_pe")
TOKENS = ("ql_nope", "q_pe", "new_kv_c", "new_k_pe")

RECOMPILES = Plan(stride=12, share=0.3)
"""For properties that compare two configs: each costs another compile."""

RETUNED = ("chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")
"""Options that may change speed only."""


@differential("dense_mla", ATTENTION, interpret=Plan(), tpu_interpret=Plan(stride=2, share=0.1))
def test_equals_the_oracle(case: DenseCase, trial: Trial) -> None:
    """The output lies within the oracle's bound; both caches are right bit by bit, untouched slots included."""
    inputs = trial.inputs()
    judge(case, trial, inputs, trial.run(inputs))


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.3, only=LONG))
def test_long_histories_equal_the_oracle(case: DenseCase, trial: Trial) -> None:
    """The same where positions need more than 16 bits."""
    inputs = trial.inputs()
    judge(case, trial, inputs, trial.run(inputs))


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1, only=WIDE))
def test_errors_have_no_bias(case: DenseCase, trial: Trial) -> None:
    """Errors lean to no side: cutting instead of rounding stays within the bound of every element, but adds up."""
    inputs = dataclasses.replace(case, values=dataclasses.replace(case.values, mode="positive")).inputs()
    expected, bound, *_ = trial.expect(inputs)
    out, *_ = trial.run(inputs)
    trial.judge(inputs, out, expected, bound)
    trial.unbiased(out, expected, bound)


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_repeats_bit_by_bit(case: DenseCase, trial: Trial) -> None:
    """The same call gives the same bits."""
    inputs = trial.inputs()
    one, two = trial.run(inputs), trial.run(inputs)
    used = slice(0, len(case.written()))
    trial.same_bits(two[0][used], one[0][used], "value", "a second run of the same call")


@differential("dense_mla", "update_kv_cache", interpret=Plan(stride=5, share=0.25))
def test_cache_write_alone(case: DenseCase, trial: Trial) -> None:
    """update_kv_cache writes what the attention call writes, and nothing else."""
    inputs = trial.inputs()
    judge_caches(trial, trial.expect(inputs), trial.run(cache_write(inputs)))


@differential("dense_mla", "ref_mla_ragged_paged_attention", interpret=Plan(stride=5, share=0.25))
def test_reference_equals_the_oracle(case: DenseCase, trial: Trial) -> None:
    """The jnp reference is right too."""
    inputs = trial.inputs()
    judge(case, trial, inputs, trial.run(reference(inputs)))


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_page_names_do_not_matter(case: DenseCase, trial: Trial) -> None:
    """Renaming the physical pages, contents and tables together, changes no bit of the output."""
    inputs, pool = trial.inputs(), case.config.pool
    order = np.argsort(bits.words(case.values.seed, 99, pool), kind="stable")
    moved = {name: np.empty_like(inputs.args[name]) for name in CACHES}
    for name, cache in moved.items():
        cache[order] = inputs.args[name]
    renamed = dataclasses.replace(case, pages=tuple(int(order[page]) for page in case.pages))
    moved["page_indices"] = renamed.metadata()["page_indices"]
    used = slice(0, len(case.written()))
    trial.same_bits(trial.run(inputs.with_arrays(moved))[0][used], trial.run(inputs)[0][used], "value", "pages renamed")


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_heads_are_interchangeable(case: DenseCase, trial: Trial) -> None:
    """Reversing the order of heads reverses the outputs."""
    inputs = trial.inputs()
    backwards = {name: np.ascontiguousarray(inputs.args[name][:, ::-1]) for name in ("ql_nope", "q_pe")}
    out, *_ = trial.run(inputs.with_arrays(backwards))
    expected, bound, *_ = trial.expect(inputs)
    trial.judge(inputs, out[:, ::-1], expected, bound, "heads reversed:")


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_hidden_keys_do_not_matter(case: DenseCase, trial: Trial) -> None:
    """Changing history that the window hides from every query changes no bit of the output."""
    config, inputs = case.config, trial.inputs()
    if config.mask_value is not None or not config.sliding_window:
        return
    hidden, visible = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        first = max(0, kv_len - q_len - config.sliding_window + 1)
        hidden.append(case.slots(sequence, np.arange(first)))
        visible.append(case.slots(sequence, np.arange(first, kv_len)))
    slots = np.setdiff1d(np.concatenate(hidden), np.concatenate(visible))
    changed = {name: inputs.args[name].copy() for name in CACHES}
    for cache in changed.values():
        rows = cache.reshape(-1, cache.shape[-1])
        rows[slots] = -rows[slots]
    used = slice(0, len(case.written()))
    trial.same_bits(trial.run(inputs.with_arrays(changed))[0][used], trial.run(inputs)[0][used], "value", "hidden keys")


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_order_of_sequences_does_not_matter(case: DenseCase, trial: Trial) -> None:
    """Listing the mixed sequences backwards gives every token the output it had."""
    inputs, (i, j, n) = trial.inputs(), case.distribution
    expected, bound, *_ = trial.expect(inputs)
    order = [*range(j), *reversed(range(j, n))]
    turned, rows = case.part([(s, 0, case.q_lens[s]) for s in order], (i, j, n))
    out, *_ = trial.run(inputs.with_arrays(rearranged(inputs, turned, rows)))
    trial.judge(inputs, out[: len(rows)], expected[rows], bound[rows], "sequences in another order:")


@differential("dense_mla", ATTENTION, interpret=RECOMPILES)
def test_tuning_changes_speed_only(case: DenseCase, trial: Trial) -> None:
    """Other block sizes, those of the subject's choice, and a promise of the chunk size withdrawn stay in the bound.

    So does debugging, whose messages pytest keeps.
    """
    inputs = trial.inputs()
    for pages, queries, debug in ((1, 1, True), (None, None, None)):
        options = {"num_kv_pages_per_block": pages, "num_queries_per_block": queries, "debug_mode": debug}
        outputs = trial.run(inputs.with_options(options | {"chunk_prefill_size": None}))
        judge(case, trial, inputs, outputs, f"blocks of {queries} queries, {pages} pages:")


@differential("dense_mla", ATTENTION, interpret=Plan(share=0.1))
def test_empty_sequences_are_skipped(case: DenseCase, trial: Trial) -> None:
    """Where values can't be validated, sequences without queries are passed over, in every range and place."""
    inputs = trial.inputs()
    kept = bits.choices(case.values.seed, 98, (case.active,), 2)
    part, rows = case.part([(s, 0, int(q_len * kept[s])) for s, q_len in enumerate(case.q_lens)], case.distribution)
    emptied = inputs.with_arrays(rearranged(inputs, part, rows))
    judge(part, trial, emptied, trial.run(emptied), "some sequences emptied:")


@differential("dense_mla", ATTENTION, interpret=RECOMPILES)
def test_a_wide_window_is_none(case: DenseCase, trial: Trial) -> None:
    """A window that reaches every key changes no more than no window; so does a huge cap."""
    inputs = trial.inputs()
    wide = inputs.with_options({"sliding_window": 10**6, "soft_cap": None})
    none = inputs.with_options({"sliding_window": None, "soft_cap": None})
    judge(case, trial, none, trial.run(wide), "a window past every key:")


@differential("dense_mla", ATTENTION, interpret=RECOMPILES)
def test_chunks_equal_one_shot(case: DenseCase, trial: Trial) -> None:
    """Prefilling in two calls gives what one call gives, and leaves the same caches."""
    inputs = trial.inputs().with_options({"chunk_prefill_size": None, "mask_value": None})
    expected = trial.expect(inputs)
    middle = [q_len // 2 for q_len in case.q_lens]
    first = [(s, 0, end) for s, end in enumerate(middle) if end]
    second = [(s, start, case.q_lens[s]) for s, start in enumerate(middle)]
    caches: dict[str, np.ndarray] = {}
    for taken in (first, second):
        chunk, rows = case.part(taken, (0, 0, len(taken)))
        out, *after = trial.run(inputs.with_arrays(rearranged(inputs, chunk, rows) | caches))
        trial.judge(inputs, out[: len(rows)], expected[0][rows], expected[1][rows], "prefilled in two chunks:")
        caches = dict(zip(CACHES, after, strict=True))
    judge_caches(trial, expected, tuple(caches.values()))


@differential("dense_mla", ATTENTION, interpret=Plan(stride=4, share=0.01))
def test_bad_calls_are_refused(case: DenseCase, trial: Trial) -> None:
    """Every wrong shape, dtype or option raises a ValueError that names the argument."""
    for what, argument, bad in bad_static_calls(trial.inputs()):
        trial.refused(bad, argument, what)


@differential("dense_mla", "update_kv_cache", interpret=Plan(stride=8, share=0.01))
def test_bad_cache_writes_are_refused(case: DenseCase, trial: Trial) -> None:
    """update_kv_cache refuses by itself what it can't write."""
    for what, argument, bad in bad_cache_writes(cache_write(trial.inputs())):
        trial.refused(bad, argument, what)


@differential("dense_mla", "ref_mla_ragged_paged_attention", interpret=Plan(stride=8, share=0.01))
def test_bad_calls_of_the_reference_are_refused(case: DenseCase, trial: Trial) -> None:
    """The jnp reference refuses what the kernel refuses."""
    for what, argument, bad in bad_static_calls(reference(trial.inputs())):
        if argument not in RETUNED:
            trial.refused(bad, argument, what)


@differential("dense_mla", "static_validate_inputs", interpret=Plan(stride=4, share=0.01))
def test_static_validation(case: DenseCase, trial: Trial) -> None:
    """static_validate_inputs takes a good call whatever its values are, and refuses a wrong shape, dtype or option."""
    inputs = trial.inputs()
    validate = dataclasses.replace(inputs, entry="static_validate_inputs")
    trial.accepted(validate.with_arrays({"kv_lens": np.full_like(inputs.args["kv_lens"], -1)}))
    for what, argument, bad in bad_static_calls(validate):
        trial.refused_by_value(bad, argument, what)


@differential("dense_mla", "dynamic_validate_inputs", interpret=Plan(stride=2, share=0.1))
def test_bad_values_are_refused(case: DenseCase, trial: Trial) -> None:
    """A good call passes dynamic_validate_inputs; a wrong index value raises a ValueError that names the argument."""
    inputs = trial.inputs()
    validate = dataclasses.replace(inputs, entry="dynamic_validate_inputs")
    trial.accepted(validate)
    for what, argument, bad in bad_values(case, validate):
        trial.refused_by_value(bad, argument, what)


test_compiles = compiles("dense_mla", ATTENTION)


def cache_write(inputs: Inputs) -> Inputs:
    """The call of update_kv_cache that writes the same rows."""
    names = ("new_kv_c", "new_k_pe", *CACHES, "kv_lens", "page_indices", "cu_q_lens", "distribution")
    return Inputs("update_kv_cache", {name: inputs.args[name] for name in names}, donated=CACHES)


def reference(inputs: Inputs) -> Inputs:
    """The same call of the jnp reference."""
    options = {name: value for name, value in inputs.options.items() if name not in RETUNED}
    return dataclasses.replace(inputs, entry="ref_mla_ragged_paged_attention", options=options)


def rearranged(inputs: Inputs, part: DenseCase, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of `part` that differ from `inputs`: its metadata, and its tokens, which are `rows` of `inputs`."""
    arrays = part.metadata()
    for name in TOKENS:
        arrays[name] = inputs.args[name].copy()
        arrays[name][: len(rows)] = inputs.args[name][rows]
    return arrays


def judge(case: DenseCase, trial: Trial, inputs: Inputs, outputs: tuple[np.ndarray, ...], what: str = "") -> None:
    """Hold outputs of a call against the oracle of `inputs`."""
    expected = trial.expect(inputs)
    trial.judge(inputs, outputs[0], expected[0], expected[1], what)
    if outputs[0].dtype != inputs.args["ql_nope"].dtype:
        trial.fail("value", f"out: dtype {outputs[0].dtype}, wanted that of ql_nope")
    judge_caches(trial, expected, outputs[1:])


def judge_caches(trial: Trial, expected: tuple[np.ndarray, ...], caches: tuple[np.ndarray, ...]) -> None:
    """Hold both caches against the oracle's, bit by bit."""
    for name, got, want in zip(CACHES, caches, expected[2:], strict=True):
        trial.same_bits(bits.unsigned_view(got), want, "cache", name)
