"""A trial: one case, one property, one backend; every way in which it can fail leads to a `Finding` here."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from properties import aot
from properties.backends import Backend, BackendError, Outputs
from properties.case import Inputs, Record
from properties.compare import Verdict, first_changed_bit, judge, lean
from properties.families import FAMILIES
from properties.family import Expected
from properties.findings import Discrepancy, Unsupported, finding
from properties.flight import Flight
from properties.strict_interpret import Unsupported as CannotInterpret
from properties.strict_interpret import Violation
from properties.subjects import NotProvidedError, Subject


@dataclass
class Tally:
    """What a station counted: cases, where the seconds went, and how close to its bound the subject came."""

    cases: int = 0
    unsupported: int = 0
    worst_ratio: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time spent inside to `part` (draw, arrays, kernel, oracle, compare)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


@dataclass
class Trial:
    """What a property is given beside the case."""

    record: Record
    subject: Subject
    backend: Backend | None
    """None for the compile backend, which runs nothing."""
    tally: Tally
    flight: Flight

    def inputs(self) -> Inputs:
        """The arrays of the case."""
        with self.tally.timing("arrays"):
            return self.record.case.inputs()

    def run(self, inputs: Inputs) -> Outputs:
        """The subject's outputs.

        Raises:
            Discrepancy: the call raised, raced, read out of bounds or waited for ever.
            Unsupported: the backend can't run it.
            BackendError: the backend is gone.
            NotProvidedError: the subject lacks the entry point.
        """
        try:
            with self.flight.carrying(self.record, self.subject.choose), self.tally.timing("kernel"):
                return self.backend.run(self.subject, inputs)
        except (BackendError, NotProvidedError):
            raise  # no verdict on the kernel
        except Violation as violation:
            self.fail(violation.kind, str(violation))
        except CannotInterpret as error:
            raise Unsupported(str(error)) from error
        except ValueError as error:
            self.fail("validation", f"refused a valid call: {_one_line(error)}")
        except Exception as error:
            self.fail("crash", f"{type(error).__name__}: {_one_line(error)}")

    def refused(self, inputs: Inputs, argument: str, what: str) -> None:
        """Fail unless the call raises a ValueError that names `argument`; `what` says what is wrong with it."""
        self._refused(lambda: self.backend.run(self.subject, inputs), argument, what)

    def refused_by_value(self, inputs: Inputs, argument: str, what: str) -> None:
        """As `refused`, but called outside jit, where the values of the arrays are known."""
        self._refused(lambda: _call_eagerly(self.subject, inputs), argument, what)

    def accepted(self, inputs: Inputs) -> None:
        """Fail if the call, outside jit, raises anything."""
        try:
            _call_eagerly(self.subject, inputs)
        except Exception as error:
            self.fail("validation", f"{inputs.entry} refused a valid call: {_one_line(error)}")

    def _refused(self, call: Callable[[], object], argument: str, what: str) -> None:
        try:
            with self.flight.carrying(self.record, self.subject.choose):
                call()
        except (BackendError, NotProvidedError):
            raise  # no verdict on the kernel
        except ValueError as error:
            if argument not in str(error):
                self.fail("validation", f"{what}: the error does not name {argument}: {_one_line(error)}")
        except Exception as error:
            self.fail("validation", f"{what}: {type(error).__name__} instead of ValueError: {_one_line(error)}")
        else:
            self.fail("validation", f"{what}: accepted")

    def compile(self, target: str) -> None:
        """Compile the case's config for a TPU generation.

        Raises:
            Discrepancy: the TPU compiler refuses it.
            NotProvidedError: the subject lacks the entry point.
        """
        inputs = self.record.case.config.abstract()
        function = self.subject.function(inputs.entry)
        try:
            with self.flight.carrying(self.record, self.subject.choose), self.tally.timing("kernel"):
                aot.compile_for(function, inputs, target)
        except aot.CompileError as error:
            self.fail("compile", f"{target}: {_one_line(error)}", str(error))

    def expect(self, inputs: Inputs) -> Expected:
        """What the oracle says of `inputs`."""
        with self.tally.timing("oracle"):
            return FAMILIES[self.record.case.family].expect(inputs)

    def judge(self, inputs: Inputs, got: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str = "") -> None:
        """Fail unless `got` lies within `bound` of `expected`, element by element."""
        with self.tally.timing("compare"):
            self._same_kind(got, expected.shape, what or "out")
            verdict = judge(got, expected, bound)
            self.tally.worst_ratio = max(self.tally.worst_ratio, min(verdict.ratio, 1e9))
        if verdict.kind:
            self.fail(
                verdict.kind, f"{what} {_headline(verdict, got.size)}".strip(), self._explain(inputs, got, verdict)
            )

    def unbiased(self, got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
        """Fail if the errors of `got` [..., columns], each within its bound, lean to one side all together."""
        with self.tally.timing("compare"):
            mean, limit = lean(got, expected, bound)
        if abs(mean) > limit:
            side = "away from" if mean > 0 else "towards"
            self.fail("value", f"errors lean {side} zero: {mean:+.3f} x the bound on average, by chance {limit:.3f}")

    def same_bits(self, got: np.ndarray, want: np.ndarray, kind: str, what: str) -> None:
        """Fail unless `got` and `want` are equal bit by bit; `what` says what they are."""
        self._same_kind(got, want.shape, what)
        if got.dtype != want.dtype:
            self.fail(kind, f"{what}: dtype {got.dtype}, wanted {want.dtype}")
        with self.tally.timing("compare"):
            index = first_changed_bit(got, want)
        if index is not None:
            self.fail(kind, f"{what}: bits differ, first at {list(index)}: got {got[index]}, want {want[index]}")

    def fail(self, kind: str, summary: str, details: str = "") -> None:
        """Report a finding.

        Raises:
            Discrepancy: always.
        """
        block = "\n".join(part for part in (describe(self.record), details) if part)
        raise Discrepancy(finding(self.record, self.subject.choose, kind, summary, block))

    def _same_kind(self, got: np.ndarray, shape: tuple[int, ...], what: str) -> None:
        if got.shape != shape:
            self.fail("value", f"{what}: shape {list(got.shape)}, wanted {list(shape)}")

    def _explain(self, inputs: Inputs, got: np.ndarray, verdict: Verdict) -> str:
        return FAMILIES[self.record.case.family].explain(self.record.case, inputs, got, verdict)


def describe(record: Record) -> str:
    """The case as one readable block."""
    case = record.case
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    width = max(map(len, fields))
    return "\n".join(f"  {name:<{width}}  {_compact(value)}" for name, value in fields.items() if value != ())


def _compact(value: object) -> str:
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return "".join(f"\n    {number}. {item}" for number, item in enumerate(value, start=1))
    if isinstance(value, tuple):
        return "[" + " ".join(_compact(item) for item in value) + "]"
    return str(value)


def _headline(verdict: Verdict, size: int) -> str:
    error = abs(verdict.got - verdict.want)
    place = f"{verdict.off} of {size} elements off; worst {list(verdict.worst)}"
    allowed = f"|error| {error:.3g} is {verdict.ratio:.3g} x the bound {verdict.bound:.3g}"
    return f"{place}: got {verdict.got:.6g}, want {verdict.want:.6g}, {allowed}"


def _call_eagerly(subject: Subject, inputs: Inputs) -> object:
    return subject.function(inputs.entry)(*inputs.args.values(), **inputs.kwargs, **inputs.options)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
