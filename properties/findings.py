"""A finding: what is reported when a subject fails, and the exception that carries it out of a property."""

import shlex
from dataclasses import dataclass

from properties.case import Record

KINDS = ("value", "nan", "cache", "race", "oob", "hang", "crash", "compile", "validation")


@dataclass(frozen=True)
class Finding:
    """One failure, as the gate's JSON lists it."""

    kernel: str
    property: str
    backend: str
    kind: str
    """One of KINDS."""
    case: str
    """The record's JSON, one line."""
    summary: str
    """One line."""
    repro: str
    """A shell command that replays it."""
    details: str = ""
    """The report for a person: case, worst element, likeliest key."""

    def __str__(self) -> str:
        head = f"{self.kind.upper()} in {self.kernel} on {self.backend}: {self.property}: {self.summary}"
        return "\n".join(part for part in (head, self.details, f"repro: {self.repro}") if part)


class Discrepancy(AssertionError):
    """Raised by a property when the subject breaks it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Unsupported(Exception):
    """The backend can't run this call: an outcome of its own, neither passed nor wrong."""


def finding(record: Record, choose: str, kind: str, summary: str, details: str = "") -> Finding:
    """The finding of `record`. Its repro line works anywhere, since the case stands in it; `choose` are the arguments
    that choose the subject (empty for our own kernel).
    """
    repro = f"python -m ci repro {shlex.quote(record.to_json())} {choose}".rstrip()
    names = (record.case.kernel, record.property or "", record.backend or "")
    return Finding(*names, kind, record.to_json(), summary, repro, details)
