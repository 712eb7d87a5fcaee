"""The folder of a night of fuzzing: who holds it, what was found, and how it is read back.

run.json        options, seed, versions, state, findings with their counts
events.jsonl    every station, finding and progress, appended as it happens: all the rest follows from it
failures/*.json a record that `python -m ci repro` reads, with versions, device, verdict and repro line
rounds/         JUnit XML and pytest's output of each round
flight/         the case of each worker, on disk before the kernel runs
"""

import fcntl
import hashlib
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ci import journal
from properties.case import SCHEMA

FOLDERS = ("failures", "rounds", "flight")


class NightError(Exception):
    """A folder that can't be used; the message is one line for the user."""


@dataclass
class Night:
    """What is known of a run; `take` brings it up to date with events.jsonl."""

    folder: Path
    head: dict[str, Any] = field(default_factory=dict)
    """options, seed, versions, device, started: fixed when the night begins."""
    state: str = "running"
    cases: int = 0
    rounds: int = 0
    configs: set[str] = field(default_factory=set)
    findings: dict[str, dict] = field(default_factory=dict)
    """By signature; the first one's fields, with `id` and `count`."""
    errors: int = 0
    """Items without a verdict, for a reason of the harness's own."""
    _read: int = 0

    @property
    def events(self) -> Path:
        """The file of events."""
        return self.folder / "events.jsonl"

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A night as its folder tells it.

        Raises:
            NightError: it is none, or another version's.
        """
        try:
            plain = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise NightError(f"{folder}: not the folder of a fuzz run ({error})") from None
        if plain.get("schema") != SCHEMA:
            raise NightError(f"{folder}: schema {plain.get('schema')!r}, wanted {SCHEMA}")
        head = {name: plain[name] for name in ("options", "seed", "versions", "device", "started")}
        night = cls(folder, head, plain["state"])
        night.take()
        return night

    def take(self) -> list[dict]:
        """Count the events that came since the last call; returns those that are findings of a new sort."""
        if not self.events.exists():
            return []
        events, self._read = journal.read(self.events, self._read)
        return [new for event in events if (new := self._take(event))]

    def _take(self, event: dict) -> dict | None:
        match event["event"]:
            case "station":
                self.cases += event["cases"]
                if event["cases"]:
                    self.configs.add(event["config"])
            case "round":
                self.rounds = event["round"]
            case "error":
                self.errors += 1
            case "finding":
                name = signature(event)
                if name in self.findings:
                    self.findings[name]["count"] += 1
                else:
                    self.findings[name] = {**event, "id": identity(event["case"]), "count": 1}
                    return self.findings[name]
        return None

    def save(self) -> None:
        """Write run.json, all at once.

        Raises:
            OSError: the disk is full; the file is then as it was.
        """
        names = ("id", "count", "kernel", "property", "backend", "kind", "summary", "repro")
        found = [{name: finding[name] for name in names} for finding in self.findings.values()]
        counts = {"rounds": self.rounds, "cases": self.cases, "configs": len(self.configs), "errors": self.errors}
        plain = {"schema": SCHEMA, "state": self.state, **self.head, **counts, "findings": found}
        _write(self.folder / "run.json", plain)

    def save_failure(self, finding: dict) -> None:
        """Write failures/ID.json.

        Raises:
            OSError: the disk is full.
        """
        told = {name: finding[name] for name in ("id", "kernel", "kind", "summary", "details", "repro", "time")}
        about = {name: self.head[name] for name in ("seed", "versions", "device")}
        _write(self.folder / "failures" / f"{finding['id']}.json", {**json.loads(finding["case"]), **told, **about})


def signature(finding: dict) -> str:
    """What equal failures share: kernel, property, backend, kind and config."""
    config = json.loads(finding["case"])["case"]["config"]
    return json.dumps([finding[name] for name in ("kernel", "property", "backend", "kind")] + [config])


def identity(case: str) -> str:
    """A short name for a case."""
    return hashlib.sha256(case.encode()).hexdigest()[:10]


def device() -> str:
    """The machine, for a person."""
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores"


def lock(folder: Path) -> int:
    """Make the folder and hold it until this process and its children end; returns the lock's file descriptor.

    Raises:
        NightError: another run holds it, or it can't be made.
    """
    try:
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NightError(f"{folder}: another fuzz run holds this folder") from None
    except OSError as error:
        raise NightError(f"{folder}: {error.strerror}") from None
    return descriptor


def _write(path: Path, plain: dict) -> None:
    """Replace the file at once, so that a full disk or a kill leaves the old one."""
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(plain, indent=1) + "\n")
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.replace(path)
