"""Pallas TPU interpret mode with nothing forgiven.

JAX's interpreter simulates a TPU's memories, copies and semaphores on the CPU, but lets much pass: a negative index
wraps, a count left on a semaphore is printed, a copy that nobody waits for never runs, a wait that nobody answers
hangs, and a small vector clock overlooks races. `run_strict` makes each of these a `Violation`, at once, with the
kernel's source line, by replacing a dozen of the interpreter's functions while the call runs (`interpreter_hooks`).
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src import dispatch
from jax.experimental.pallas import tpu as pltpu

from properties.interpreter_hooks import CLOCK_SIZE, DmaMode, Violation, Watch, installed

T = TypeVar("T")


class Unsupported(Exception):
    """The interpreter can't run this kernel; nothing is known about its correctness."""


def params(seed: int = 0) -> pltpu.InterpretParams:
    """Interpreter parameters to trace a kernel under before it is given to `run_strict`.

    They are part of jit's cache key, whether passed as `interpret=` or through `pltpu.force_tpu_interpret_mode`: equal
    parameters reuse a trace, and another `seed` (which shuffles the parallel grid dimensions) traces again. When the
    copies run is no parameter: `run_strict` decides it for each run.
    """
    return pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=CLOCK_SIZE,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        random_seed=seed,
    )


def run_strict(call: Callable[[], T], *, dma: DmaMode) -> T:
    """Run `call`, whose Pallas kernels were traced under `params()`, and return its result once it is ready.

    With dma "on_wait" a copy runs as late as the semaphores allow, latest started first, so a missing wait reads what
    was there before (NaN in fresh scratch); with "eager" it runs when started, so a buffer reused too early shows the
    new data. Not to be nested, nor run by two threads at once: the simulated TPU is global.

    Raises Violation: "race" for unordered accesses, semaphore counts left over, copies never waited for; "oob" for an
    index outside its array, negative ones included; "hang" for a wait that nothing can satisfy; "crash" for any other
    failure of the running kernel. Raises Unsupported when the interpreter itself gives up. What `call` raises before
    its kernels run (a refused argument) passes unchanged. After any of them the simulated TPU is reset: the next run
    starts clean.
    """
    watch = Watch(dma)
    with installed(watch):
        try:
            result = jax.block_until_ready(call())
            jax.effects_barrier()
            return result
        except BaseException as error:
            _reset()
            _raise_as_seen(watch, error)
            raise


def _raise_as_seen(watch: Watch, error: BaseException) -> None:
    """Raise what the hooks saw behind `error`, if anything: XLA passes on no more than the text of an exception."""
    if watch.violation is not None:
        raise watch.violation from None
    if watch.inability is None and type(watch.failure) is RuntimeError:  # a block of the output is visited twice
        raise Violation("crash", str(watch.failure)) from watch.failure
    cause = watch.inability or watch.failure
    if cause is not None:
        raise Unsupported(f"{type(cause).__name__}: {cause}") from cause
    if isinstance(error, NotImplementedError):  # an operation of the kernel that does not lower for a CPU
        raise Unsupported(str(error)) from error
    if isinstance(error, jax.errors.JaxRuntimeError):
        raise Violation("crash", str(error)) from error


def _reset() -> None:
    # The failed program's token would fail the next program that takes it.
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()
    pltpu.reset_tpu_interpret_mode_state()
