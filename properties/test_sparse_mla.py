"""What must hold of every sparse MLA call."""

import dataclasses

import numpy as np

from properties import bits
from properties.case import Inputs
from properties.sparse_mla.case import SparseCase
from properties.sparse_mla.refusals import bad_calls
from properties.sparse_mla.strategies import WIDE
from properties.stations import Plan, compiles, differential
from properties.trial import Trial

ATTENTION = "sparse_mla_attention"

RECOMPILES = Plan(stride=8, share=0.3)
"""For properties that compare two configs: each costs another compile."""


@differential("sparse_mla", ATTENTION, interpret=Plan(), tpu_interpret=Plan(stride=2, share=0.1))
def test_equals_the_oracle(case: SparseCase, trial: Trial) -> None:
    """Every element lies within the oracle's bound of the oracle's value, and the inputs stay as they were."""
    inputs = trial.inputs()
    before = inputs.digest()
    expected, bound = trial.expect(inputs)
    (out,) = trial.run(inputs)
    trial.judge(inputs, out, expected, bound)
    if out.dtype != np.float32:
        trial.fail("value", f"out: dtype {out.dtype}, wanted float32")
    if inputs.digest() != before:
        trial.fail("cache", "an input was written")


@differential("sparse_mla", ATTENTION, interpret=Plan(share=0.1, only=WIDE))
def test_errors_have_no_bias(case: SparseCase, trial: Trial) -> None:
    """Errors lean to no side: cutting instead of rounding stays within the bound of every element, but adds up."""
    inputs = dataclasses.replace(case, values=dataclasses.replace(case.values, mode="positive")).inputs()
    expected, bound = trial.expect(inputs)
    (out,) = trial.run(inputs)
    trial.judge(inputs, out, expected, bound)
    trial.unbiased(out, expected, bound)


@differential("sparse_mla", ATTENTION, interpret=Plan(share=0.1))
def test_repeats_bit_by_bit(case: SparseCase, trial: Trial) -> None:
    """The same call gives the same bits."""
    inputs = trial.inputs()
    trial.same_bits(trial.run(inputs)[0], trial.run(inputs)[0], "value", "a second run of the same call")


@differential("sparse_mla", ATTENTION, interpret=Plan(share=0.1))
def test_page_names_do_not_matter(case: SparseCase, trial: Trial) -> None:
    """Renaming the physical pages, contents and tables together, changes no bit."""
    inputs = trial.inputs()
    if case.config.source == "flat":
        return
    pool = case.config.pool
    order = np.argsort(bits.words(case.values.seed, 99, pool), kind="stable")
    moved = {"kv": np.empty_like(inputs.args["kv"])}
    moved["kv"][order] = inputs.args["kv"]
    table = "page_table" if case.config.source == "paged" else "page_indices"
    ids = inputs.kwargs[table]
    real = (ids >= 0) & (ids < pool)
    moved[table] = np.where(real, order[np.where(real, ids, 0)], ids).astype(np.int32)
    trial.same_bits(trial.run(inputs.with_arrays(moved))[0], trial.run(inputs)[0], "value", "pages renamed")


@differential("sparse_mla", ATTENTION, interpret=Plan(share=0.1))
def test_order_of_units_does_not_matter(case: SparseCase, trial: Trial) -> None:
    """Listing the units of every query backwards stays within the bound."""
    inputs = trial.inputs()
    backwards = inputs.with_arrays({"indices": np.ascontiguousarray(inputs.args["indices"][..., ::-1])})
    judge_against(trial, inputs, backwards, "units listed backwards:")


@differential("sparse_mla", ATTENTION, interpret=RECOMPILES)
def test_batch_rows_are_independent(case: SparseCase, trial: Trial) -> None:
    """Each row alone gives what it gives in the batch; a ragged batch splits by query."""
    inputs, config = trial.inputs(), case.config
    expected, bound = trial.expect(inputs)
    if config.source == "ragged":
        axes = {"q": 1, "indices": 1, "positions": 1, "q_seq_id": 0}
        count, axis = config.queries, 1
    else:
        axes = {"q": 0, "indices": 0, "positions": 0, "page_table": 0, "kv": 0}
        axes = axes if config.source == "flat" else axes | {"kv": None}
        count, axis = config.batch, 0
    for row in range(count):
        one = slice(row, row + 1)
        parts = {name: np.take(inputs.arrays[name], [row], at) for name, at in axes.items()
                 if at is not None and name in inputs.arrays}  # fmt: skip
        (out,) = trial.run(inputs.with_arrays(parts))
        rows = (slice(None),) * axis + (one,)
        trial.judge(inputs, out, expected[rows], bound[rows], f"row {row} alone:")


@differential("sparse_mla", ATTENTION, interpret=RECOMPILES)
def test_block_units_change_speed_only(case: SparseCase, trial: Trial) -> None:
    """Another number of units a step stays within the bound."""
    inputs = trial.inputs()
    for block_units in {1, case.config.topk, case.config.topk + 1} - {case.config.block_units}:
        judge_against(trial, inputs, inputs.with_options({"block_units": block_units}), f"block_units {block_units}:")


@differential("sparse_mla", ATTENTION, interpret=RECOMPILES)
def test_a_unit_is_its_tokens(case: SparseCase, trial: Trial) -> None:
    """Listing the single tokens of every unit, with read_block 1, stays within the bound."""
    inputs, rb = trial.inputs(), case.config.read_block
    units = inputs.args["indices"].astype(np.int64)[..., None]
    tokens = np.where(units < 0, -1, np.minimum(units * rb + np.arange(rb), 2**31 - 1))
    single = inputs.with_arrays({"indices": tokens.reshape(*units.shape[:2], -1).astype(np.int32)})
    single = single.with_options({"read_block": 1})
    judge_against(trial, inputs, single, "units as single tokens:")


@differential("sparse_mla", ATTENTION, interpret=RECOMPILES)
def test_an_empty_list_gives_zero(case: SparseCase, trial: Trial) -> None:
    """Lists of no unit at all, K = 0, give zeros like lists of padding."""
    inputs = trial.inputs()
    none = inputs.with_arrays({"indices": inputs.args["indices"][..., :0]})
    judge_against(trial, none, none, "K = 0:")


@differential("sparse_mla", "units_to_token_ids", interpret=RECOMPILES)
def test_units_expand_to_their_tokens(case: SparseCase, trial: Trial) -> None:
    """units_to_token_ids names each unit's tokens; negative ids for padding, ids past every length for huge units."""
    units = trial.inputs().args["indices"].copy()
    for rb in {case.config.read_block, 3, 16}:
        units[..., -1] = (2**31 - 1) // rb  # the first token is an int32, the last one may not be
        judge_expansion(case, trial, units, rb)


@differential("sparse_mla", "flat_to_paged_cache", interpret=RECOMPILES)
def test_flat_rows_become_pages(case: SparseCase, trial: Trial) -> None:
    """flat_to_paged_cache keeps every row where its table says, bit by bit."""
    config = case.config
    kv = case.values.keys(2 * config.tokens, config.kv_lora_rank, config.rope, config.sm_scale, [])
    kv = kv.astype(bits.DTYPES[config.dtype]).reshape(2, config.tokens, config.width)
    for page_size in (8, 16):
        packing, pages = 4 // kv.dtype.itemsize, -(-config.tokens // page_size)
        options = {"page_size": page_size, "kv_packing": packing}
        cache, table = trial.run(Inputs("flat_to_paged_cache", {"kv": kv}, options=options))
        found, wanted = (*cache.shape[:3], *table.shape), (2 * pages, page_size // packing, packing, 2, pages)
        if found != wanted:
            trial.fail("value", f"pages, rows, packing and table: found {found}, wanted {wanted}")
        rows = cache.reshape(cache.shape[0], page_size, -1)[table].reshape(2, -1, cache.shape[-1])
        trial.same_bits(
            rows[:, : config.tokens, : config.width], kv, "cache", f"rows read back from pages of {page_size}"
        )


@differential("sparse_mla", ATTENTION, interpret=Plan(stride=3, share=0.01))
def test_bad_calls_are_refused(case: SparseCase, trial: Trial) -> None:
    """Every call that the contract forbids raises a ValueError that names the argument."""
    for what, argument, bad in bad_calls(case.config, trial.inputs()):
        trial.refused(bad, argument, what)


test_compiles = compiles("sparse_mla", ATTENTION)


def judge_against(trial: Trial, original: Inputs, changed: Inputs, what: str) -> None:
    """Hold the outputs of a changed call against the oracle of the original one."""
    expected, bound = trial.expect(original)
    (out,) = trial.run(changed)
    trial.judge(original, out, expected, bound, what)


def judge_expansion(case: SparseCase, trial: Trial, units: np.ndarray, read_block: int) -> None:
    """Hold units_to_token_ids of `units` int32 [B, S, K] against the contract."""
    (ids,) = trial.run(Inputs("units_to_token_ids", {"indices": units}, options={"read_block": read_block}))
    wide = units.astype(np.int64)[..., None] * read_block + np.arange(read_block)
    want = wide.reshape(*units.shape[:2], -1)
    if ids.shape != want.shape:
        trial.fail("value", f"ids {list(ids.shape)}, wanted {list(want.shape)}")
    too_large = np.repeat(wide[..., -1] > 2**31 - 1, read_block, axis=-1)
    wrong = np.where(want < 0, ids >= 0, np.where(too_large, ids < case.config.tokens, ids != want))
    if wrong.any():
        trial.fail("value", f"ids {ids[wrong][:4]} where {want[wrong][:4]} are meant, read_block {read_block}")
