"""Tiny kernels, each with one fault that only a strict run of the TPU interpreter sees, with late and eager copies."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from properties import interpreter_hooks
from properties.happens_before import Access, BufferHistory, overlap, to_box
from properties.strict_interpret import DmaMode, Unsupported, Violation, params, run_strict

MODES: tuple[DmaMode, ...] = ("on_wait", "eager")
TILE = (8, 128)
X = jnp.arange(4 * 8 * 128, dtype=jnp.float32).reshape(4, *TILE)


def build(kernel: Callable, num_buffers: int = 2, **kwargs: Any) -> Callable:
    """Jitted kernel of refs i int32 [1] (SMEM), x f32 [4, 8, 128] (HBM), out f32 [8, 128], buf [n, 8, 128], sem [n]."""
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(TILE, jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((num_buffers, *TILE), jnp.float32), pltpu.SemaphoreType.DMA((num_buffers,))],
        interpret=params(),
        **kwargs,
    )
    return jax.jit(call)


def run(kernel: Callable, dma: DmaMode, i: int = 0) -> np.ndarray:
    """`kernel`'s output for index i, from a strict run."""
    call = build(kernel)
    return np.asarray(run_strict(lambda: call(jnp.array([i], jnp.int32), X), dma=dma))


def ring(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    """Sum x over its first axis, two copies in flight."""

    def copy(step: Any) -> Any:
        return pltpu.make_async_copy(x.at[step], buf.at[step % 2], sem.at[step % 2])

    out[...] = jnp.zeros(TILE, jnp.float32)
    copy(0).start()

    @pl.loop(0, 4)
    def _(step: Any) -> None:
        @pl.when(step + 1 < 4)
        def _() -> None:
            copy(step + 1).start()

        copy(step).wait()
        out[...] += buf[step % 2]


def no_wait(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    copy = pltpu.make_async_copy(x.at[i[0]], buf.at[0], sem.at[0])
    copy.start()
    out[...] = buf[0]
    copy.wait()


def overwrites_source(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    buf[0] = jnp.zeros(TILE, jnp.float32)
    copy = pltpu.make_async_copy(buf.at[0], buf.at[1], sem.at[0])
    copy.start()
    buf[0] = jnp.ones(TILE, jnp.float32)
    copy.wait()
    out[...] = buf[1]


def overwrites_read_buffer(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[0], buf.at[0])
    copy = pltpu.make_async_copy(x.at[1], buf.at[0], sem.at[0])
    copy.start()
    out[...] = buf[0]
    copy.wait()


def two_copies_into_one_place(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    copies = [pltpu.make_async_copy(x.at[k], buf.at[0], sem.at[k]) for k in range(2)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
    out[...] = buf[0]


def waits_on_the_other_slot(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    copies = [pltpu.make_async_copy(x.at[k], buf.at[k], sem.at[k]) for k in range(2)]
    for copy in copies:
        copy.start()
    copies[1].wait()
    out[...] = buf[0]
    copies[0].wait()


def never_waited(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.make_async_copy(x.at[i[0]], buf.at[0], sem.at[1]).start()
    out[...] = jnp.zeros(TILE, jnp.float32)


def waits_for_less(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.make_async_copy(x.at[0], buf.at[0], sem.at[0]).start()
    pltpu.make_async_copy(x.at[0, pl.ds(0, 4)], buf.at[0, pl.ds(0, 4)], sem.at[0]).wait()
    out[...] = buf[0]


def signals_too_often(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    def body(regular: Any) -> None:
        pl.semaphore_signal(regular, 2)
        pl.semaphore_wait(regular, 1)

    pl.run_scoped(body, pltpu.SemaphoreType.REGULAR)
    out[...] = jnp.zeros(TILE, jnp.float32)


RACES = [
    no_wait,
    overwrites_source,
    overwrites_read_buffer,
    two_copies_into_one_place,
    waits_on_the_other_slot,
    never_waited,
    waits_for_less,
    signals_too_often,
]


def waits_twice(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    copy = pltpu.make_async_copy(x.at[0], buf.at[0], sem.at[0])
    copy.start()
    copy.wait()
    copy.wait()
    out[...] = buf[0]


def waits_for_more(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.make_async_copy(x.at[0, pl.ds(0, 4)], buf.at[0, pl.ds(0, 4)], sem.at[0]).start()
    pltpu.make_async_copy(x.at[0], buf.at[0], sem.at[0]).wait()
    out[...] = buf[0]


def waits_on_a_semaphore_nobody_signals(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pl.run_scoped(lambda regular: pl.semaphore_wait(regular, 1), pltpu.SemaphoreType.REGULAR)
    out[...] = buf[0]


HANGS = [waits_twice, waits_for_more, waits_on_a_semaphore_nobody_signals]


def copies_from(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[i[0]], buf.at[0])
    out[...] = buf[0]


def copies_rows_from(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[0, pl.ds(i[0], 8)], buf.at[0])
    out[...] = buf[0]


def copies_rows_to(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[0, pl.ds(0, 4)], buf.at[0, pl.ds(i[0], 4)])
    out[...] = buf[0]


def loads_at(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    out[...] = buf[i[0]]


def stores_at(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    buf[i[0]] = jnp.zeros(TILE, jnp.float32)
    out[...] = buf[0]


def loads_scalar_at(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    out[...] = jnp.full(TILE, i[i[0]], jnp.float32)


def leaves_its_view(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[pl.ds(1, 2)].at[i[0]], buf.at[0])
    out[...] = buf[0]


def copies_negative_size(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
    pltpu.sync_copy(x.at[0, pl.ds(0, i[0])], buf.at[0, pl.ds(0, i[0])])
    out[...] = buf[0]


OUT_OF_BOUNDS = [
    (copies_from, 4),
    (copies_from, -1),
    (copies_rows_from, 1),
    (copies_rows_from, -1),
    (copies_rows_to, 5),
    (copies_rows_to, -4),
    (loads_at, 2),
    (loads_at, -1),
    (stores_at, 2),
    (stores_at, -2),
    (loads_scalar_at, -1),
    (leaves_its_view, 2),
    (leaves_its_view, -1),
    (copies_negative_size, -1),
]


@pytest.mark.parametrize("dma", MODES)
def test_clean_kernel_passes_and_is_right(dma: DmaMode) -> None:
    np.testing.assert_array_equal(run(ring, dma), X.sum(0))


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize("kernel", RACES, ids=lambda kernel: kernel.__name__)
def test_race(kernel: Callable, dma: DmaMode) -> None:
    with pytest.raises(Violation) as caught:
        run(kernel, dma)
    assert caught.value.kind == "race"


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize("kernel", HANGS, ids=lambda kernel: kernel.__name__)
def test_hang(kernel: Callable, dma: DmaMode) -> None:
    with pytest.raises(Violation) as caught:
        run(kernel, dma)
    assert caught.value.kind == "hang"


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize(("kernel", "i"), OUT_OF_BOUNDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_out_of_bounds(kernel: Callable, i: int, dma: DmaMode) -> None:
    with pytest.raises(Violation) as caught:
        run(kernel, dma, i)
    assert caught.value.kind == "oob"


@pytest.mark.parametrize(
    ("kernel", "i"), [(copies_from, 3), (copies_rows_from, 0), (loads_at, 1), (leaves_its_view, 1)]
)
def test_in_bounds_edges_pass(kernel: Callable, i: int) -> None:
    run(kernel, "on_wait", i)


def test_uninitialised_scratch_reads_nan() -> None:
    assert np.isnan(run(loads_at, "on_wait", 1)).all()


def test_copy_of_no_rows_and_its_wait_pass() -> None:
    run(copies_negative_size, "on_wait", 0)


def test_message_names_semaphore_count_and_line() -> None:
    with pytest.raises(Violation, match=r"semaphore #1 of core 0 still holds 4096"):
        run(never_waited, "eager")
    with pytest.raises(Violation, match=r"never waited for .*test_strict_interpret.py.*never_waited"):
        run(never_waited, "on_wait")
    with pytest.raises(Violation, match=r"wait for 4096 on semaphore #0 .* holds 0"):
        run(waits_twice, "on_wait")


def test_masked_store_may_reach_past_the_end() -> None:
    def store_two_rows(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
        rows = jax.lax.broadcasted_iota(jnp.int32, TILE, 0)
        out[...] = jnp.zeros(TILE, jnp.float32)
        pltpu.store(out.at[pl.ds(i[0], 8)], jnp.ones(TILE, jnp.float32), mask=rows < 2)

    assert run(store_two_rows, "on_wait", 6).sum() == 2 * 128
    with pytest.raises(Violation) as caught:
        run(store_two_rows, "on_wait", 7)
    assert caught.value.kind == "oob"


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize(("bad", "i"), [(no_wait, 0), (never_waited, 0), (waits_twice, 0), (copies_from, -1)])
def test_run_after_a_violation_is_unaffected(bad: Callable, i: int, dma: DmaMode) -> None:
    good, faulty = build(ring), build(bad)
    index = jnp.array([i], jnp.int32)
    for _ in range(3):
        with pytest.raises(Violation):
            run_strict(lambda: faulty(index, X), dma=dma)
        np.testing.assert_array_equal(run_strict(lambda: good(index, X), dma=dma), X.sum(0))
    jax.effects_barrier()


def test_race_in_the_first_of_two_kernels_is_kept() -> None:
    racy, good = build(overwrites_read_buffer), build(ring)
    index = jnp.zeros(1, jnp.int32)
    with pytest.raises(Violation) as caught:
        run_strict(lambda: (racy(index, X), good(index, X)), dma="eager")
    assert caught.value.kind == "race"


def test_both_copy_modes_share_one_trace() -> None:
    traces = 0

    def counted(*refs: Any) -> None:
        nonlocal traces
        traces += 1
        ring(*refs)

    call = build(counted)
    index = jnp.zeros(1, jnp.int32)
    for dma in MODES:
        np.testing.assert_array_equal(run_strict(lambda: call(index, X), dma=dma), X.sum(0))
    assert traces == 1


def test_forced_interpret_mode_needs_no_interpret_argument() -> None:
    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    @jax.jit
    def call(x: jax.Array) -> jax.Array:
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pltpu.force_tpu_interpret_mode(params()):
        np.testing.assert_array_equal(run_strict(lambda: call(X[0]), dma="eager"), X[0] * 2)


def test_blocks_that_overhang_their_array_are_no_violation() -> None:
    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    rows = pl.BlockSpec(TILE, lambda step: (step, 0))
    shape = jax.ShapeDtypeStruct((12, 128), jnp.float32)
    call = pl.pallas_call(double, grid=(2,), out_shape=shape, in_specs=[rows], out_specs=rows, interpret=params())
    x = X.reshape(32, 128)[:12]
    np.testing.assert_array_equal(run_strict(lambda: jax.jit(call)(x), dma="on_wait"), x * 2)


@pytest.mark.parametrize("in_the_body", [False, True])
def test_what_the_interpreter_cannot_do_is_unsupported(in_the_body: bool) -> None:
    def kernel(i: Any, x: Any, out: Any, buf: Any, sem: Any) -> None:
        if in_the_body:
            out[...] = buf.reshape(2 * 8, 128)[pl.ds(0, 8)]
        else:
            out[...] = jnp.full(TILE, pl.semaphore_read(sem.at[0]), jnp.float32)

    with pytest.raises(Unsupported):
        run(kernel, "on_wait")
    np.testing.assert_array_equal(run(ring, "on_wait"), X.sum(0))


def test_kernel_traced_under_lax_parameters_is_refused() -> None:
    @jax.jit
    def call(x: jax.Array) -> jax.Array:
        return pl.pallas_call(pltpu.sync_copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()), pytest.raises(Unsupported, match="other interpreter"):
        run_strict(lambda: call(X[0]), dma="on_wait")


def test_output_block_visited_twice_is_a_crash() -> None:
    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    back_and_forth = pl.BlockSpec(TILE, lambda step: (step % 2, 0))
    shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    specs = {"in_specs": [back_and_forth], "out_specs": back_and_forth}
    call = jax.jit(pl.pallas_call(double, grid=(3,), out_shape=shape, interpret=params(), **specs))
    with pytest.raises(Violation, match="crash: Revisited block"):
        run_strict(lambda: call(X.reshape(32, 128)[:16]), dma="on_wait")


def test_seed_shuffles_the_parallel_grid() -> None:
    def number_the_steps(out: Any, count: Any) -> None:
        count[0] = jnp.where(count[0] < 8, count[0], -1) + 1  # fresh SMEM holds the largest integer
        out[...] = jnp.full(TILE, count[0], jnp.int32)

    def order(seed: int) -> list[int]:
        call = pl.pallas_call(
            number_the_steps,
            grid=(8,),
            out_shape=jax.ShapeDtypeStruct((64, 128), jnp.int32),
            out_specs=pl.BlockSpec(TILE, lambda step: (step, 0)),
            scratch_shapes=[pltpu.SMEM((1,), jnp.int32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=params(seed),
        )
        return np.asarray(run_strict(jax.jit(call), dma="on_wait"))[::8, 0].tolist()

    assert order(0) != order(1)
    assert sorted(order(0)) == list(range(8))


def test_violation_survives_pickling() -> None:
    violation = pickle.loads(pickle.dumps(Violation("oob", "read at 4")))
    assert (violation.kind, violation.message, str(violation)) == ("oob", "read at 4", "oob: read at 4")


def test_refused_argument_passes_unchanged() -> None:
    def refuse() -> None:
        raise ValueError("sm_scale: found None, wanted a number")

    with pytest.raises(ValueError, match="sm_scale"):
        run_strict(refuse, dma="on_wait")


def test_changed_interpreter_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_hooks.shared_memory.Semaphore, "wait", lambda self, amount: None)
    with pytest.raises(RuntimeError, match=r"JAX .* changed its TPU interpreter: Semaphore.wait"):
        run(ring, "on_wait")


def test_hooks_are_gone_after_a_run() -> None:
    before = [vars(owner).get(name) for owner, name, *_ in interpreter_hooks.HOOKS]
    run(ring, "on_wait")
    with pytest.raises(Violation):
        run(no_wait, "on_wait")
    assert [vars(owner).get(name) for owner, name, *_ in interpreter_hooks.HOOKS] == before


def test_boxes_overlap_by_elements_not_by_hulls() -> None:
    assert overlap(to_box((slice(0, 4, 1),)), to_box((3, slice(0, 8, 1))))
    assert not overlap(to_box((slice(0, 4, 1),)), to_box((4,)))
    assert not overlap(to_box((slice(0, 8, 2),)), to_box((slice(1, 8, 2),)))
    assert overlap(to_box((slice(0, 8, 2),)), to_box((slice(1, 8, 3),)))


def test_history_forgets_only_what_a_later_access_stands_for() -> None:
    history, box = BufferHistory(), to_box((slice(0, 4, 1),))
    write, read = Access(1, 1, box, None), Access(0, 5, box, None)
    assert history.write(write, np.array([0, 1, 0])) is None
    assert history.read(read, np.array([5, 0, 0])) is write  # the reader never waited for actor 1
    assert history.read(Access(0, 6, box, None), np.array([6, 1, 0])) is None
    late = history.write(Access(2, 1, box, None), np.array([5, 1, 1]))  # knows the first read, not the second
    assert late is not None
    assert late.time == 6
