"""A look at one planted fault: a gate in a process of its own, which may hang or die.

Processes are forked from one that has imported everything but the kernels, since imports would take longer than most
faults take to be seen. Compiled functions that a fault doesn't touch are reused from one look to the next.
"""

import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ci.mutants.planting import Mutant

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["ci.gate", "properties.plugin", "xdist.plugin"])


def reuse_compiled_functions(folder: Path) -> None:
    """Let all looks keep their compiled functions in `folder`; to be called before the first look."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def first_finding(mutant: Mutant, backend: str, prop: str, seconds: float, call_limit: int) -> dict[str, Any] | None:
    """The first finding of the gate on `backend`, as its JSON lists it, or None within `seconds`.

    Only tests whose name holds `prop` are run; all when it is empty. A call that takes longer than `call_limit`
    seconds, compile included, is a hang.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["--kernel", mutant.kernel, "--backend", backend, "--json", str(folder / "gate.json"), "--"]
        command += ["-n", "0", "-x", "--no-shrink", "--mutant", mutant.id, f"--time-limit={call_limit}"]
        command += [f"--flight={folder}", *(["-k", prop] if prop else [])]
        process = _FORKSERVER.Process(target=_gate, args=(command, folder))
        process.start()
        process.join(max(0.0, seconds))
        if process.is_alive():
            process.kill()
            process.join()
            return None
        return _result(folder, call_limit)


def _gate(command: list[str], folder: Path) -> None:
    """In the forked process: run the gate, its output in a file."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    from ci import gate

    gate.main(command)


def _result(folder: Path, call_limit: int) -> dict[str, Any] | None:
    """The gate's first finding; if its process died, what it left of the case in flight."""
    from properties import plugin

    if (folder / "gate.json").exists():
        findings = json.loads((folder / "gate.json").read_text())["failures"]
        return findings[0] if findings else None
    found = plugin.wrecked(folder, "main", call_limit)
    return dataclasses.asdict(found) if found else None
