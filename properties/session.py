"""The running session's choices: subjects, backends, seed; and what each station counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from properties.backends import Backend
from properties.case import Case, Record
from properties.determinism import SHRINK_SECONDS
from properties.families import FAMILIES
from properties.findings import Discrepancy, Unsupported
from properties.flight import Flight
from properties.minimize import minimize, simplify
from properties.subjects import Subject
from properties.trial import Tally, Trial

if TYPE_CHECKING:
    from properties.stations import Property, Station

_current: Session | None = None


@dataclass
class Session:
    """One process's view of a run. Hypothesis tests take no fixtures, so it is found by `current`."""

    subjects: dict[str, Subject]
    backends: dict[str, Backend]
    flight: Flight
    tally: Tally = field(default_factory=Tally)
    """Of the running station; whoever starts a station renews it."""

    def run(self, station: Station, data: st.DataObject) -> None:
        """Draw a case for `station` and hold its property against it."""
        with self.tally.timing("draw"):
            case = data.draw(FAMILIES[station.property.family].cases(station.config))
        self.hold(station.property, case, station.backend)

    def replay(self, station: Station, shrink_seconds: float) -> None:
        """Hold the case of `station`; a failure is made smaller for so many seconds.

        Raises:
            Discrepancy: the subject breaks it.
        """

        def hold(case: Case) -> None:
            self.hold(station.property, case, station.backend)

        try:
            hold(station.case)
        except Discrepancy as found:
            if not shrink_seconds:
                raise
            record = Record(station.case, station.property.name, station.backend)
            raise self.simplify(station, minimize(record, found, hold, shrink_seconds)) from None

    def simplify(self, station: Station, found: Discrepancy) -> Discrepancy:
        """The failure that Hypothesis shrank to, made smaller by what its family knows."""
        return simplify(found, lambda case: self.hold(station.property, case, station.backend), SHRINK_SECONDS)

    def hold(self, prop: Property, case: Case, backend: str) -> None:
        """Hold one property against one case.

        Raises:
            Discrepancy: the subject breaks it.
        """
        self.tally.cases += 1
        record = Record(case, prop.name, backend)
        try:
            prop.check(case, Trial(record, self.subjects[case.kernel], self.backends[backend], self.tally, self.flight))
        except Unsupported:
            self.tally.unsupported += 1


def current() -> Session:
    """The session of this process."""
    if _current is None:
        raise RuntimeError("no session: properties run under pytest with the repository's conftest.py")
    return _current


def begin(session: Session) -> None:
    """Make `session` the one of this process."""
    global _current
    _current = session
