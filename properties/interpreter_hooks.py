"""What a run of the TPU interpreter watches for: replacements for some of JAX's private functions.

Each hook takes the `Watch` of the run and the function it stands in for, and returns the replacement. All of the
replaced functions are looked up when a kernel runs, never when it is traced, so functions that were traced and cached
outside behave the same inside. They are found by name and their parameters are checked: a JAX that changed them stops
with one clear line.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import shared_memory
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState

from properties.happens_before import Access, BufferHistory, is_empty, to_box

Kind = Literal["race", "oob", "hang", "crash"]
DmaMode = Literal["on_wait", "eager"]

# Position 0 of a vector clock is the core's, the rest go to copies in turn: two copies share one only when a thousand
# others started between them.
CLOCK_SIZE = 1024
_FIRST_DMA_ID = 100  # the interpreter numbers copies from here; a smaller actor id is a core


class Violation(Exception):
    """The kernel did what a TPU would not forgive. `kind` says which sort, `message` what and where."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(kind, message)  # both, so that it survives pickling between processes
        self.kind: Kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Watch:
    """What the hooks of one run saw."""

    def __init__(self, dma: DmaMode) -> None:
        self.dma = dma
        self.violation: Violation | None = None
        self.inability: Exception | None = None  # raised while the interpreter translated a kernel
        self.failure: Exception | None = None  # raised by one of its callbacks, other than our own
        self.histories: dict[Any, BufferHistory] = defaultdict(BufferHistory)

    def fail(self, kind: Kind, message: str, source: Any = None) -> None:
        """Stop the kernel: raise a Violation, and keep it, since XLA keeps only its text."""
        line = source_info_util.summarize(source) if source is not None else ""
        violation = Violation(kind, f"{message} ({line})" if line else message)
        self.violation = self.violation or violation
        raise violation


def _callback(watch: Watch, original: Callable) -> Callable:
    # The arguments come as NumPy arrays and the interpreter wants no others. JAX puts each of them on a device first,
    # which takes four fifths of the time that a simulated copy or grid step costs.
    def io_callback_impl(*args: Any, callback: Callable, **_: Any) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(value) for value in callback(*args))

    return io_callback_impl


def _translate(watch: Watch, original: Callable) -> Callable:
    def interpret_pallas_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            watch.inability = error
            raise

    return interpret_pallas_call


def _start_kernel(watch: Watch, original: Callable) -> Callable:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "dma_execution_mode": watch.dma})
        watch.histories.clear()
        if self.num_cores != 1:
            refuse(f"{self.num_cores} cores: strict runs simulate one")
        if not self.detect_races or kwargs["vector_clock_size"] != CLOCK_SIZE or self.uninitialized_memory != "nan":
            refuse("the kernel was traced under other interpreter parameters than strict_interpret.params()")

    def refuse(why: str) -> None:
        watch.inability = NotImplementedError(why)
        raise watch.inability

    return init


def _set_failed(watch: Watch, original: Callable) -> Callable:
    def set_failed(self: Any, exception: Exception, *args: Any, **kwargs: Any) -> None:
        watch.failure = watch.failure or exception
        original(self, exception, *args, **kwargs)

    return set_failed


def _copy_position(watch: Watch, original: Callable) -> Callable:
    def get_random_virtual_device_id(self: Any) -> int:
        return _clock_position(interpreter.dma_id_counter.value - 1)  # the copy that is being started has the last id

    return get_random_virtual_device_id


def _clock_position(actor: int) -> int:
    return 0 if actor < _FIRST_DMA_ID else 1 + (actor - _FIRST_DMA_ID) % (CLOCK_SIZE - 1)


def _check_access(watch: Watch, original: Callable) -> Callable:
    record = BufferHistory.read if original.__name__ == "check_read" else BufferHistory.write
    verb = "read" if original.__name__ == "check_read" else "write"

    def check(self: Any, actor: Any, *args: Any, source_info: Any = None) -> None:
        clock, key, indices = args[-3:]
        clock = getattr(clock, "clock", clock)  # 0.12 wraps the array
        position = _clock_position(actor[0] if isinstance(actor, tuple) else actor)
        access = Access(position, int(clock[position]), to_box(indices), source_info)
        racing = record(watch.histories[key], access, clock)
        if racing is not None:
            by = "a copy" if position else "the kernel"
            other_by = "a copy" if racing.actor else "the kernel"
            line = source_info_util.summarize(racing.source) if racing.source is not None else "a block of the pipeline"
            watch.fail(
                "race",
                f"{verb} of {_name(key)}{list(indices)} by {by} is not ordered with an access to {list(racing.box)} "
                f"by {other_by} at {line}",
                source_info,
            )

    return check


def _wait(watch: Watch, original: Callable) -> Callable:
    def wait(self: Any, value: Any, global_core_id: int, *, logging_info: Any = None, **kwargs: Any) -> None:
        value, source = int(value), getattr(logging_info, "source_info", None)
        if value < 0:
            watch.fail("oob", f"wait of negative size {value} on semaphore {_ordinal(self)}", source)
        if value == 0:
            return  # satisfied by nothing; the interpreter trips over a semaphore never signalled
        while self.count_by_core[global_core_id] < value:
            if not self.tasks[global_core_id]:
                watch.fail(
                    "hang",
                    f"wait for {value} on semaphore {_ordinal(self)} of core {global_core_id}, which holds "
                    f"{int(self.count_by_core[global_core_id])}, and no copy under way will signal it",
                    source,
                )
            self.tasks[global_core_id].pop()()
        original(self, value, global_core_id, logging_info=logging_info, **kwargs)

    return wait


def _end_kernel(watch: Watch, original: Callable) -> Callable:
    def get_sempahores_with_nonzero_count(self: Any, device_id: int) -> list:
        for semaphore, core in original(self, device_id):
            count = int(semaphore.count_by_core[core])
            message = f"semaphore {_ordinal(semaphore)} of core {core} still holds {count} at the end of the kernel"
            watch.fail("race", f"{message}: more was signalled than waited for")
        for semaphore in [*self.sem.values(), *self.fixed_id_sem.values()]:
            for copy in (task.__self__ for tasks in semaphore.tasks for task in tasks):
                moves_nothing = is_empty(to_box(interpret_utils.to_range(copy.dst_transforms)))
                if copy.state.name != "COMPLETED" and not moves_nothing:
                    message = f"copy that signals semaphore {_ordinal(semaphore)} was started and never waited for"
                    watch.fail("race", message, copy.source_info)
        return []

    return get_sempahores_with_nonzero_count


def _views(watch: Watch, original: Callable) -> Callable:
    # The first view is checked against its buffer, where it is used; a view of a view must also stay inside the view.
    def to_range(transforms: Any) -> Any:
        for view in transforms[1:]:
            box = to_box(original((view,)))
            if all(isinstance(dim, int) for dim in view.shape) and (fault := _fault(box, view.shape)):
                watch.fail("oob", f"{fault} of a view of shape {view.shape}")
        return original(transforms)

    return to_range


def _touch(watch: Watch, original: Callable) -> Callable:
    verb = original.__name__.removesuffix("_buffer_content").replace("get", "read")

    def touch(self: Any, key: Any, rnge: Any, *args: Any, logging_info: Any = None, **kwargs: Any) -> Any:
        shape, box = self.mem[key].logical_shape, to_box(rnge)
        source = getattr(logging_info, "source_info", None)
        if verb == "swap" and args[1] is not None:  # a masked store touches only what its mask lets through
            box = _masked(rnge, args[1], shape)
        if box is not None and (fault := _fault(box, shape)):
            watch.fail("oob", f"{verb} at {fault} of {_name(key)} of shape {shape}", source)
        if verb == "store" and (wanted := _extent(rnge, shape)) != args[0].shape:
            watch.fail("oob", f"{args[0].shape} elements stored to {wanted} of {_name(key)}", source)
        return original(self, key, rnge, *args, logging_info=logging_info, **kwargs)

    return touch


def _fault(box: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with `box` as an index into `shape`, or None."""
    for axis, ((start, stop, step), dim) in enumerate(zip(box, shape, strict=False)):
        if stop < start:
            return f"negative size {(stop - start) // step} on axis {axis} (size {dim})"
        if start < stop and (start < 0 or start + (stop - start - 1) // step * step >= dim):
            return f"{'negative index' if start < 0 else 'index'} {start}:{stop} on axis {axis} (size {dim})"
    return None


def _extent(indices: tuple[slice | int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(len(range(i.start, i.stop, i.step or 1)) for i in indices if isinstance(i, slice))
    return sizes + tuple(shape[len(indices) :])


def _masked(indices: tuple[slice | int, ...], mask: np.ndarray, shape: tuple[int, ...]) -> Any:
    """The smallest box around what `mask` lets through, or None when that is nothing."""
    if not mask.any():
        return None
    whole = to_box((*indices, *(slice(0, dim, 1) for dim in shape[len(indices) :])))
    sliced = [axis for axis, index in enumerate(whole) if axis >= len(indices) or isinstance(indices[axis], slice)]
    box = list(whole)
    for axis, hits in zip(sliced, np.nonzero(mask), strict=True):
        start, _, step = whole[axis]
        box[axis] = (start + int(hits.min()) * step, start + int(hits.max()) * step + 1, step)
    return box


def _name(key: Any) -> str:
    space, buffer, *_ = key
    return f"{space} buffer {buffer - 100}"  # the interpreter numbers them from 100: operands, scratch, then scoped


def _ordinal(semaphore: Any) -> str:
    return f"#{semaphore.id - 2000}" if semaphore.id >= 2000 else f"(barrier {semaphore.id})"


HOOKS: list[tuple[Any, str, tuple[str, ...], Callable[[Watch, Callable], Callable]]] = [
    (jax_callback, "io_callback_impl", ("args", "result_avals", "callback", "sharding", "ordered"), _callback),
    (interpreter, "interpret_pallas_call", ("args", "jaxpr"), _translate),
    (interpret_utils, "to_range", ("transforms",), _views),
    (RaceDetectionState, "check_read", ("clock", "buffer_key", "rnge", "source_info"), _check_access),
    (RaceDetectionState, "check_write", ("clock", "buffer_key", "rnge", "source_info"), _check_access),
    (shared_memory.Semaphore, "wait", ("self", "value", "global_core_id", "has_tasks", "logging_info"), _wait),
    (shared_memory.SharedMemory, "__init__", ("self", "dma_execution_mode", "vector_clock_size"), _start_kernel),
    (shared_memory.SharedMemory, "set_failed", ("self", "exception"), _set_failed),
    (shared_memory.SharedMemory, "get_random_virtual_device_id", ("self",), _copy_position),
    (shared_memory.SharedMemory, "get_buffer_content", ("self", "key", "rnge", "logging_info"), _touch),
    (shared_memory.SharedMemory, "store_buffer_content", ("self", "key", "rnge", "value", "logging_info"), _touch),
    (shared_memory.SharedMemory, "swap_buffer_content", ("self", "key", "rnge", "value", "mask"), _touch),
    (shared_memory.SharedMemory, "get_sempahores_with_nonzero_count", ("self", "device_id"), _end_kernel),
]


@contextlib.contextmanager
def installed(watch: Watch) -> Iterator[None]:
    """Replace the interpreter's functions while the context is open; RuntimeError when this JAX has other ones."""
    with contextlib.ExitStack() as stack:
        for owner, name, wanted, hook in HOOKS:
            original = getattr(owner, name, None)
            found = tuple(inspect.signature(original).parameters) if original is not None else ()
            if not set(wanted) <= set(found):
                raise RuntimeError(
                    f"JAX {jax.__version__} changed its TPU interpreter: {owner.__name__}.{name} has parameters "
                    f"{found}, {__name__} needs {wanted}"
                )
            own = name in vars(owner)
            setattr(owner, name, hook(watch, original))
            stack.callback(*((setattr, owner, name, original) if own else (delattr, owner, name)))
        yield
