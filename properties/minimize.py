"""A smaller case that fails the same way: Hypothesis searches and shrinks around a recorded one."""

import contextlib
import time
from collections.abc import Callable, Iterator

from hypothesis import given, seed
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import engine

from properties import determinism
from properties.case import Case, Record
from properties.families import CASES, FAMILIES
from properties.findings import Discrepancy

EXAMPLES = 2000
"""More than there is time for."""


def minimize(record: Record, first: Discrepancy, hold: Callable[[Case], None], seconds: float) -> Discrepancy:
    """The simplest failure of `first`'s kind that `hold` raises within `seconds`; `first` if none is simpler.

    Any config may be drawn, the case's own in half of the tries: both static options and structure shrink.
    """
    best, end = first, time.monotonic() + seconds
    family = FAMILIES[record.case.family]
    around = st.one_of(family.configs(), st.just(record.case.config)).flatmap(family.cases)

    @determinism.profile(EXAMPLES, None)
    @seed(0)
    @given(around)
    def search(case: Case) -> None:
        nonlocal best
        if time.monotonic() > end:
            return
        try:
            hold(case)
        except Discrepancy as found:
            if found.finding.kind == first.finding.kind:
                best = min(best, found, key=_size)
                raise

    limit, engine.MAX_SHRINKING_SECONDS = engine.MAX_SHRINKING_SECONDS, seconds
    try:
        with contextlib.suppress(Discrepancy, Flaky):  # Flaky: the last failure found no time to repeat
            search()
    finally:
        engine.MAX_SHRINKING_SECONDS = limit
    return best


def simplify(found: Discrepancy, hold: Callable[[Case], None], seconds: float) -> Discrepancy:
    """The failure of `found`'s kind that is left when no case which its family calls simpler fails within `seconds`."""
    end = time.monotonic() + seconds
    candidates = _simpler(found)
    while time.monotonic() < end and (case := next(candidates, None)):
        try:
            hold(case)
        except Discrepancy as smaller:
            if smaller.finding.kind == found.finding.kind:
                found, candidates = smaller, _simpler(smaller)
    return found


def _simpler(failure: Discrepancy) -> Iterator[Case]:
    case = Record.from_json(failure.finding.case, CASES).case
    return FAMILIES[case.family].simpler(case)


def _size(failure: Discrepancy) -> tuple[int, int]:
    """What a person would call small: few bytes of input, then a short text."""
    case = Record.from_json(failure.finding.case, CASES).case
    return sum(array.nbytes for array in case.config.abstract().arrays.values()), len(failure.finding.case)
