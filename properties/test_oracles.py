"""The oracles themselves: the plain loop, simulated kernels, planted faults and their imports hold them to account."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracles
from oracles import dense_mla, sparse_mla
from oracles.paging import bits, decode, locate, packing
from oracles.precision import Precision
from oracles.softmax import softmax_attention
from properties.dense_mla import strategies as dense_strategies
from properties.dense_mla.case import DenseCase
from properties.simulated_kernel import Kernel
from properties.sparse_mla import strategies as sparse_strategies
from properties.sparse_mla.case import SparseCase

BF16 = ml_dtypes.bfloat16
TUNING = ("block_units", "chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block")
CHECKED = settings(database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

sparse_cases = sparse_strategies.configs().flatmap(sparse_strategies.cases)
dense_cases = dense_strategies.configs().flatmap(dense_strategies.cases)


def untuned(options: dict) -> dict:
    """The options that an oracle knows."""
    return {name: value for name, value in options.items() if name not in TUNING}


# The vectorised oracles against the plain loops.


@settings(CHECKED, max_examples=60)
@given(case=sparse_cases)
def test_sparse_equals_the_loop(case: SparseCase) -> None:
    """Flat, paged and ragged, with padding, duplicates, ids out of range, empty requests and poison."""
    inputs = case.inputs()
    call = inputs.arrays | untuned(inputs.options)
    expected, bound = sparse_mla.sparse_mla_attention(**call)
    plain = sparse_mla.sparse_mla_attention_by_token(**call)
    assert np.all(np.isfinite(expected))
    assert np.all(np.isfinite(bound))
    np.testing.assert_allclose(expected, plain, rtol=1e-9, atol=1e-9)
    for b, s in np.ndindex(plain.shape[:2]):
        if not sparse_mla.row(b, s, **call).counts.any():
            assert not np.any(expected[b, s])
            assert not np.any(bound[b, s])


@settings(CHECKED, max_examples=25)
@given(case=dense_cases)
def test_dense_equals_the_loop(case: DenseCase) -> None:
    """Both caches to the bit, and the output of every row that belongs to a sequence; the others are unspecified."""
    inputs = case.inputs()
    call = inputs.arrays | untuned(inputs.options)
    expected, bound, *caches = dense_mla.mla_ragged_paged_attention(**call)
    plain, *plain_caches = dense_mla.mla_ragged_paged_attention_by_token(**call)
    rows = sum(case.q_lens)
    np.testing.assert_allclose(expected, plain, rtol=1e-9, atol=1e-9)
    assert np.all(np.isfinite(bound[:rows]))
    assert np.all(np.isposinf(bound[rows:]))
    for cache, plain_cache in zip(caches, plain_caches, strict=True):
        np.testing.assert_array_equal(cache, bits(plain_cache))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("read_block", [1, 4, None])
def test_prefill_writes_then_attends(dtype: type, read_block: int | None) -> None:
    """Two requests in pages out of order, one behind a cached prefix, with padded tokens whose writes are dropped."""
    noise, page_size, latent, rope, heads = np.random.default_rng(1), 8, 24, 8, 3
    seq_lens, cu_q_lens = np.array([13, 0, 9]), np.array([0, 5, 5, 14])
    pages = np.array([4, 1, 3, 0])  # of request 0 (two) and request 2 (two)
    cu_kv_lens = np.array([0, 16, 16, 32])
    tokens, positions = 16, np.concatenate([np.arange(8, 13), np.arange(9), [0, 0]])
    loc = np.concatenate([pages[1] * 8 + np.arange(5), pages[2] * 8 + np.arange(8), [pages[3] * 8], [-1, 5 * 8]])
    pk = packing(dtype)
    cache = noise.normal(size=(5, page_size // pk, pk, 128)).astype(dtype)
    ql, qpe, kvc, kpe = (
        noise.normal(size=shape).astype(dtype)
        for shape in ((tokens, heads, latent), (tokens, heads, rope), (tokens, latent), (tokens, rope))
    )
    units = noise.integers(-1, -(-16 // (read_block or page_size)), (tokens, 6))
    units[14] = -1
    options = {"kv_lora_rank": latent, "page_size": page_size, "sm_scale": 0.3, "read_block": read_block}
    arrays = (ql, qpe, kvc, kpe, cache, units, positions, loc)
    written = cache.copy()
    for t in range(14):
        written[locate(int(loc[t]), page_size, pk)] = np.concatenate([kvc[t], kpe[t], np.zeros(96, dtype)])
    source = {"q_seq_id": [0] * 5 + [2] * 9, "seq_lens": seq_lens, "cu_kv_lens": cu_kv_lens, "page_indices": pages}
    plain = sparse_mla.sparse_mla_attention_by_token(
        np.concatenate([ql, qpe], axis=-1)[None, :14], written, units[None, :14], positions[None, :14],
        kv_lora_rank=latent, read_block=read_block or page_size, sm_scale=0.3, page_size=page_size, **source,
    )[0]  # fmt: skip
    expected, bound, after = sparse_mla.prefill_write_and_attend_ragged(
        *arrays, seq_lens, cu_q_lens, cu_kv_lens, pages, **options
    )
    np.testing.assert_array_equal(after, bits(written))
    np.testing.assert_allclose(expected[:14], plain, rtol=1e-9, atol=1e-9)
    assert not np.any(bound[14])
    assert np.all(np.isposinf(bound[15])) == np.any(units[15] == 0)

    # One request on its own, from position 0: the last of the two.
    one = slice(5, 14)
    arrays = (*(x[one] for x in (ql, qpe, kvc, kpe)), cache, units[one], positions[one], loc[one])
    alone, _, after = sparse_mla.prefill_write_and_attend(*arrays, **options)
    np.testing.assert_allclose(alone, plain[one], rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(after[pages[:2]], bits(cache)[pages[:2]])


# Soundness: no correct kernel exceeds the bound; tightness: a wrong one does.

RECIPES = {"even": 0.01, "normal": 1.0, "sharp": 4.0, "huge": 300.0}
"""Standard deviation of the scores, nats."""

kernels = st.builds(
    Kernel,
    block=st.sampled_from([1, 3, 8, 64]),
    order=st.integers(0, 5),
    one_by_one=st.booleans(),
    base_two=st.booleans(),
    scale_queries=st.booleans(),
    cast=st.sampled_from(["none", "values", "all"]),
    coarse=st.sampled_from([0.0, 2.0**-21 * 0.9]),
)


def attention_data(seed: int, recipe: str, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """q [4, D], keys [n, D], values [n, L] of `dtype`, and a scale that gives scores the recipe's spread."""
    noise = np.random.default_rng(seed)
    n, width, latent = int(noise.integers(1, 40)), int(noise.choice([24, 96])), 16
    q, keys = noise.normal(size=(4, width)), noise.normal(size=(n, width))
    if seed % 3 == 0:
        keys[noise.integers(n)] += q.mean(axis=0)  # a winner
    if seed % 4 == 0:
        keys += 3  # values far from zero, and scores that cancel
    q, keys = q.astype(dtype), keys.astype(dtype)
    return q, keys, keys[:, :latent], RECIPES[recipe] / float(np.sqrt(width))


def oracle(q: np.ndarray, keys: np.ndarray, values: np.ndarray, precision: Precision, **options: float) -> tuple:
    """The core's (expected, bound) with all keys present."""
    wide = (decode(bits(x), x.dtype) for x in (q, keys, values))
    return softmax_attention(*wide, np.ones(len(keys), bool), precision=precision, **options)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_correct_kernels_stay_within_the_bound(dtype: type, recipe: str) -> None:
    """Any blocking, order, base and place of the scale; the worst come close enough for the bound to mean something."""
    ratios = []

    @settings(CHECKED, max_examples=100)
    @given(kernel=kernels, seed=st.integers(0, 10**6), capped=st.booleans(), narrow=st.booleans())
    def run(kernel: Kernel, seed: int, capped: bool, narrow: bool) -> None:
        q, keys, values, scale = attention_data(seed, recipe, dtype)
        options = {"scale": scale, "soft_cap": 5.0 if capped else None, "value_scale": 0.7}
        output = BF16 if narrow else np.float32
        kernel = replace(kernel, output=output, cast=kernel.cast if dtype is BF16 else "none")
        expected, bound = oracle(q, keys, values, Precision.of(dtype, dtype, output), **options)
        got = kernel(q, keys, values, **options).astype(np.float64)
        ratios.append(float(np.max(np.abs(got - expected) / bound)))
        assert ratios[-1] <= 1

    run()
    assert max(ratios) > 0.1


@settings(CHECKED, max_examples=150)
@given(seed=st.integers(0, 10**6), roundoff=st.integers(-14, -3), recipe=st.sampled_from(["normal", "sharp"]))
def test_bound_holds_for_large_score_errors(seed: int, roundoff: int, recipe: str) -> None:
    """The weights' analysis alone, hull included: scores moved to the ends of their error intervals, exactly."""
    q, keys, values, scale = attention_data(seed, recipe, np.float32)
    u = 2.0**roundoff / (keys.shape[1] + 8)
    precision = Precision(dot=0.0, accumulation=u, probability=0.0, elementary=0.0, tanh=0.0, output=0.0)
    expected, bound = oracle(q, keys, values, precision, scale=scale)
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    error = u * (keys.shape[1] + 8) * scale * (np.abs(q) @ np.abs(keys.T))
    noise = np.random.default_rng(seed)
    for _ in range(8):
        scores = scale * (q @ keys.T) + error * noise.choice([-1, 1], error.shape)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        moved = weights @ values / weights.sum(axis=1, keepdims=True)
        assert np.all(np.abs(moved - expected) <= bound)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("recipe", ["normal", "sharp"])
def test_a_missing_or_spurious_key_exceeds_the_bound(dtype: type, recipe: str) -> None:
    """One key of a few percent of the weight, dropped or added."""
    tried = 0
    for seed in range(60):
        q, keys, values, scale = attention_data(seed, recipe, dtype)
        scores = scale * (q.astype(np.float64) @ keys.astype(np.float64).T)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        share = (weights / weights.sum(axis=1, keepdims=True)).max(axis=0)
        rest = np.arange(len(keys)) != np.argmin(np.abs(share - 0.05))  # the key nearest to one twentieth
        if len(keys) < 2 or share[~rest] < 0.03:
            continue
        precision = Precision.of(dtype, dtype, dtype)
        expected, bound = oracle(q, keys, values, precision, scale=scale)
        fewer, fewer_bound = oracle(q, keys[rest], values[rest], precision, scale=scale)
        assert np.any(np.abs(fewer - expected) > bound)
        assert np.any(np.abs(expected - fewer) > fewer_bound)
        tried += 1
    assert tried > 30


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_scale_off_by_one_percent_exceeds_the_bound(dtype: type, spread: float) -> None:
    """On one query of 8 heads and 64 keys; a bfloat16 cache hides it in single elements, not in all."""
    for seed in range(20):
        noise = np.random.default_rng(seed)
        q, keys = (noise.normal(size=(n, 96)).astype(dtype) for n in (8, 64))
        scale, precision = spread / np.sqrt(96), Precision.of(dtype, dtype, np.float32)
        expected, bound = oracle(q, keys, keys[:, :64], precision, scale=scale)
        wrong, _ = oracle(q, keys, keys[:, :64], precision, scale=1.01 * scale)
        assert np.any(np.abs(wrong - expected) > bound)


def test_one_winner_has_a_tiny_bound() -> None:
    """Scores uncertain by whole nats don't matter where one key wins by hundreds."""
    keys = np.array([[100.0, 1.0], [0.0, -1.0]])
    precision = replace(Precision.of(np.float32, np.float32, np.float32), dot=1e-3)
    _, bound = softmax_attention(
        np.array([[100.0, 0.0]]), keys, keys[:, 1:], np.ones(2, bool), scale=1.0, precision=precision
    )
    assert bound[0, 0] < 1e-2  # the product with the value has the same coarse dot; no more than that


def test_report_names_the_fault() -> None:
    """The row's closest change is the key that was left out, or let in."""
    noise = np.random.default_rng(3)
    q, kv = noise.normal(size=(1, 1, 4, 40)), noise.normal(size=(1, 30, 40))
    call = {"kv_lora_rank": 32, "read_block": 1, "sm_scale": 0.3}
    listed = np.arange(0, 20)[None, None]
    positions = np.array([[14]])
    q, kv = q.astype(np.float32), kv.astype(np.float32)
    for attended, token, count in ((np.arange(14), 14, -1), (np.arange(16), 15, 1)):
        got, _ = sparse_mla.sparse_mla_attention(q, kv, attended[None, None], np.array([[29]]), **call)
        change = sparse_mla.row(0, 0, q, kv, listed, positions, **call).closest_change(got[0, 0])
        assert change is not None
        assert (change.token, change.count) == (token, count)
        assert change.residual < 1e-6 < change.unchanged


# Independence.


def test_oracles_import_nothing_but_numpy() -> None:
    """Only the standard library, NumPy, ml_dtypes and each other."""
    allowed = sys.stdlib_module_names | {"numpy", "ml_dtypes", "oracles"}
    for path in sorted(Path(oracles.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "oracles"] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
