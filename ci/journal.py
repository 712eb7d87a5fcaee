"""A pytest plugin that notes every station and finding in a file as it happens: `-p ci.journal --journal FILE`.

A line is one JSON object, written by one call and flushed, so that whatever is killed, recorded lines are whole.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from properties.reports import FINDING, RESULT

DISK_FULL = 20
"""pytest's exit code when the journal can't be written."""


class Journal:
    """An append-only file of events."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a line that a dead writer left unfinished is closed off."""
        self._file = path.open("ab", buffering=0)
        if path.is_file() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
            self._file.write(b"\n")

    def write(self, event: str, **fields: object) -> None:
        """Append one event.

        Raises:
            OSError: the disk is full.
        """
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")


def read(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """The events from byte `start` on, and where the next ones will begin; what is no whole event is passed over."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return list(_events(whole.splitlines())), start + len(whole)


def _events(lines: list[bytes]) -> Iterator[dict]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


class Recorder:
    """The hooks."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one item's counts, its finding, or that the harness itself failed."""
        properties = dict(report.user_properties)
        result, finding = properties.get(RESULT), properties.get(FINDING)
        try:
            if result and not report.skipped:
                self._journal.write("station", **result)
            if finding:
                self._journal.write("finding", **finding)
            elif report.failed:
                self._journal.write("error", item=report.nodeid, text=str(report.longrepr)[-2000:])
        except OSError as error:
            pytest.exit(f"the journal can't be written: {error.strerror}", returncode=DISK_FULL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option."""
    parser.addoption("--journal", type=Path, metavar="FILE", help="append an event a line here")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the controlling process only."""
    if config.option.journal and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Journal(config.option.journal)), "ragged-oracle-recorder")
