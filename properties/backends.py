"""Backends: ways to run one call of a kernel, from a function and `Inputs` to its outputs as NumPy arrays."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import hardware_utils
from jax.experimental.pallas import tpu as pltpu

from properties import strict_interpret
from properties.case import Inputs
from properties.subjects import Subject, takes_interpret

Outputs = tuple[np.ndarray, ...]

COMPILER_OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 1}
"""XLA for CPU: an interpreted kernel takes longer to compile than all its cases take to run."""
if jax.__version_info__ < (0, 11):
    COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False  # newer versions have no other way, and are as fast

COMPILES_BEFORE_CLEARING = 200
"""A process dies near 380 compiled functions, out of memory mappings."""


class Backend(Protocol):
    """One way to run a kernel."""

    name: str

    def run(self, subject: Subject, inputs: Inputs) -> Outputs:
        """Call the subject's entry point on `inputs` and wait for its outputs.

        Raises:
            strict_interpret.Violation: a race, a read out of bounds, a deadlock.
            strict_interpret.Unsupported: the backend can't run this call.
            subjects.NotProvidedError: the subject lacks the entry point.
        """
        ...


def chips() -> int:
    """How many TPU chips this machine has. Asking JAX for its devices would take them."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


class BackendError(Exception):
    """A backend that this machine can't offer; the message is one line for the user."""


class Interpret:
    """Pallas' HLO interpreter, jitted: about a millisecond a call once compiled."""

    name = "interpret"

    def run(self, subject: Subject, inputs: Inputs) -> Outputs:
        """See `Backend`."""
        return _call(subject, inputs, True)


class TpuInterpret:
    """The TPU interpreter, strict, under both orders of copies; their outputs must agree bit by bit."""

    name = "tpu-interpret"

    def run(self, subject: Subject, inputs: Inputs) -> Outputs:
        """See `Backend`. Copies run when waited for, then as soon as they start."""
        call = functools.partial(_call, subject, inputs, strict_interpret.params())
        late, eager = (strict_interpret.run_strict(call, dma=dma) for dma in ("on_wait", "eager"))
        for number, (one, other) in enumerate(zip(late, eager, strict=True)):
            if one.tobytes() != other.tobytes():
                message = f"output {number} depends on when copies land (executed on wait or at once)"
                raise strict_interpret.Violation("race", message)
        return late


class Tpu:
    """The compiled kernel on this host's TPU, which is this process's own from then on."""

    name = "tpu"

    def __init__(self) -> None:
        """Take the TPU.

        Raises:
            BackendError: there is none, or another process has it.
        """
        if not chips():
            raise BackendError("backend tpu: this machine has no TPU (interpret and tpu-interpret need none)")
        jax.config.update("jax_platforms", "tpu,cpu")
        try:
            jax.devices("tpu")
        except RuntimeError as error:
            raise BackendError(f"backend tpu: {str(error).splitlines()[0]}") from None

    def run(self, subject: Subject, inputs: Inputs) -> Outputs:
        """See `Backend`."""
        return _call(subject, inputs, False)


RUNNERS: dict[str, Callable[[], Backend]] = {"interpret": Interpret, "tpu-interpret": TpuInterpret, "tpu": Tpu}
"""Backends that run a call; `compile` (properties.aot) only compiles it."""


def _call(subject: Subject, inputs: Inputs, mode: Any) -> Outputs:
    function = subject.function(inputs.entry)
    options = tuple(inputs.options.items())
    compiled = _compiled(function, mode, options, tuple(inputs.args), tuple(inputs.kwargs))
    outputs = compiled(*inputs.args.values(), **inputs.kwargs)
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(outputs))


@functools.lru_cache(maxsize=COMPILES_BEFORE_CLEARING)
def _compiled(
    function: Callable, mode: Any, options: tuple, args: tuple[str, ...], kwargs: tuple[str, ...]
) -> Callable:
    """The jitted call for one static config; kept, so that a case costs a call and not a trace."""
    if _compiled.cache_info().misses % COMPILES_BEFORE_CLEARING == COMPILES_BEFORE_CLEARING - 1:
        free_compiled_functions()
    static = dict(options)
    compiler_options = None if mode is False else COMPILER_OPTIONS
    if takes_interpret(function):
        return jax.jit(functools.partial(function, **static, interpret=mode), compiler_options=compiler_options)
    jitted = jax.jit(functools.partial(function, **static), compiler_options=compiler_options)

    def forced(*arrays: np.ndarray, **named: np.ndarray) -> Any:
        with pltpu.force_tpu_interpret_mode(mode):
            return jitted(*arrays, **named)

    return forced if mode is not False else jitted


def free_compiled_functions() -> None:
    """Drop every compiled function and give the memory back to the system."""
    _compiled.cache_clear()
    jax.clear_caches()
    ctypes.CDLL(None).malloc_trim(0)
