"""The backend `tpu`: one process owns the chip and runs, one at a time, the calls that the workers send it.

A TPU belongs to the first process that asks for it. So workers draw, ask the oracles and compare on every core of the
host, without touching the chip, and it waits for none of them in particular.

A call that kills or hangs the owner ends the worker that sent it too, whose case in flight is then found as on any
other backend. The other workers send their calls again, to the next owner.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

from properties import backends
from properties.backends import BackendError, Outputs
from properties.case import Inputs
from properties.flight import Flight
from properties.subjects import Subject

NAME = "tpu"

RUNNING = "running"
"""What the owner answers at once when a call has its turn."""

OWNER_SECONDS = 300.0
"""How long a call waits for an owner: starting one takes some ten seconds, the calls before it their time limit."""

LATER = 5.0
"""Seconds that the owner gives a call beyond the worker's own time limit, whose end is the one that is reported."""

Load = Callable[[], Mapping[str, Subject]]
"""Loads the subjects of every kernel; a function of a module, or a partial of one, so that the owner can be sent it."""


class TpuError(Exception):
    """A call raised something other than a ValueError in the owner; the message has the error's own type in front."""


class Remote:
    """The backend as a worker sees it."""

    name = NAME

    def __init__(self, address: str, flight: Flight) -> None:
        """Send calls to the owner at `address`; the time limit of `flight` holds for a call that has its turn."""
        self._address, self._flight = address, flight
        self._connection: Connection | None = None

    def run(self, subject: Subject, inputs: Inputs) -> Outputs:
        """See `backends.Backend`.

        Raises:
            ValueError: as the call did.
            TpuError: the call raised anything else.
            BackendError: there is no owner any more.
        """
        self._flight.stop_clock()
        connection = self._on_turn((subject.kernel, inputs))
        self._flight.start_clock()
        try:
            outputs, refusal, error = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the owner died of this call
        if refusal:
            raise ValueError(refusal)
        if error:
            raise TpuError(error)
        return outputs

    def _on_turn(self, request: tuple[str, Inputs]) -> Connection:
        """Send a request, to as many owners as it takes, and wait until it runs."""
        end = time.monotonic() + OWNER_SECONDS
        while time.monotonic() < end:
            try:
                self._connection = self._connection or Client(self._address)
                self._connection.send(request)
                if self._connection.recv() == RUNNING:
                    return self._connection
            except (EOFError, OSError):
                self._connection = None
                time.sleep(0.1)
        raise BackendError(f"backend tpu: no process has owned the chip for {OWNER_SECONDS:g} s")


class Chip:
    """Keeps an owner alive, in the process that starts the workers."""

    def __init__(self, load: Load, limit: float, runner: str = NAME) -> None:
        """Start the owner.

        Args:
          load: loads the subjects.
          limit: seconds a call may take.
          runner: the key in `backends.RUNNERS` of what runs the calls; another than `tpu` tries this module.

        Raises:
            BackendError: this machine has no TPU, or another process has it.
        """
        self.address = str(Path(tempfile.mkdtemp(prefix="ragged-oracle-")) / "chip")
        self._arguments = (self.address, load, limit, runner)
        self._closed = False
        self._process, ready = self._start()
        try:
            problem = ready.recv()
        except EOFError:
            problem = "the process that was to own the TPU died"
        if problem:
            raise BackendError(problem)
        threading.Thread(target=self._keep, daemon=True).start()

    def close(self) -> None:
        """End the owner."""
        self._closed = True
        self._process.kill()

    def _start(self) -> tuple[multiprocessing.Process, Connection]:
        spawn = multiprocessing.get_context("spawn")
        ready, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=own, args=(*self._arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ready

    def _keep(self) -> None:
        while not self._closed:
            self._process.join()
            if not self._closed:
                self._process, _ = self._start()


def own(address: str, load: Load, limit: float, runner: str, ready: Connection) -> None:
    """Take the chip, say so to `ready` (None, or what went wrong), and serve until the parent process ends."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        backend, subjects = backends.RUNNERS[runner](), load()
    except BackendError as error:
        with suppress(OSError):
            ready.send(str(error))
        return
    Path(address).unlink(missing_ok=True)
    turn = threading.Lock()
    with Listener(address) as listener:
        with suppress(OSError):
            ready.send(None)
        while True:
            arguments = (listener.accept(), backend, subjects, turn, limit + LATER)
            threading.Thread(target=_serve, args=arguments, daemon=True).start()


def _follow_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _serve(
    connection: Connection,
    backend: backends.Backend,
    subjects: Mapping[str, Subject],
    turn: threading.Lock,
    limit: float,
) -> None:
    """Run the calls of one worker until it goes away."""
    with connection, suppress(EOFError, OSError), open(os.devnull, "w") as nowhere:
        while True:
            kernel, inputs = connection.recv()
            with turn:
                connection.send(RUNNING)
                faulthandler.dump_traceback_later(limit, exit=True, file=nowhere)
                answer = _answer(backend, subjects[kernel], inputs)
                faulthandler.cancel_dump_traceback_later()
            connection.send(answer)


def _answer(backend: backends.Backend, subject: Subject, inputs: Inputs) -> tuple[Outputs, str, str]:
    """Outputs, or the message of a ValueError, or any other error: those of JAX can't all be sent as they are."""
    try:
        return backend.run(subject, inputs), "", ""
    except ValueError as error:
        return (), str(error) or "ValueError", ""
    except Exception as error:
        return (), "", f"{type(error).__name__}: {error}"
