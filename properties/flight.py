"""The case in flight: on disk before the kernel runs, so that one that kills or hangs its process is still known."""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from properties.case import Record


class Flight:
    """One worker process's running case, under a time limit.

    The watchdog is faulthandler's own thread, which needs no GIL: it ends the process even when native code never
    returns.
    """

    def __init__(self, folder: Path, worker: str, limit: float) -> None:
        """Write to `folder`/`worker`.json; `limit` is in seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        self._case = folder / f"{worker}.json"
        self._stacks = (folder / f"{worker}.stacks").open("w")
        self._limit = limit

    @contextmanager
    def carrying(self, record: Record, choose: str) -> Iterator[None]:
        """Around one call of the kernel; `choose` are the arguments that choose its subject."""
        self._case.write_text(f"{choose}\n{record.to_json()}")
        self.start_clock()
        try:
            yield
        finally:
            self.stop_clock()

    def start_clock(self) -> None:
        """The time limit counts from now."""
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stacks)

    def stop_clock(self) -> None:
        """No time limit for now."""
        faulthandler.cancel_dump_traceback_later()


def wreck(folder: Path, worker: str) -> tuple[str, str, str] | None:
    """What a dead worker left: its case's JSON, the arguments that choose its subject, and "hang" or "crash"."""
    case, stacks = folder / f"{worker}.json", folder / f"{worker}.stacks"
    if not case.exists():
        return None
    choose, _, text = case.read_text().partition("\n")
    return text, choose, "hang" if stacks.exists() and stacks.stat().st_size else "crash"
