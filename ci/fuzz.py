"""`python -m ci fuzz`: rounds of the differential properties on fresh configs, for as long as you like.

Each round is one pytest run in a process of its own, so memory stays flat and nothing that happens in a round can stop
the next. This process only starts rounds, reads what they append to events.jsonl, and keeps run.json and failures/
current.
"""

import argparse
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ci.gate import QUIET, ROOT, positive
from ci.journal import DISK_FULL, Journal
from ci.night import Night, NightError, device, lock
from ci.results import versions
from properties.backends import chips

CONFIGS = 4
"""Configs a family and round: a compile each, some minutes a round."""

EXAMPLES = 100
"""Cases a config and property: about as many seconds as its compiles take."""

TIME_LIMIT = 240
"""Seconds before a call is a hang, more than the gate's: configs of the full product compile longer, and a machine may
be busy. `-- --time-limit SECONDS` sets another."""

PROGRESS_SECONDS = 30
GRACE_SECONDS = 45
"""How long the items that run when time is up may go on."""

FAILED_ROUNDS = 3
"""So many rounds in a row without a station, and the night ends: it wouldn't become better."""

MEMORY_SHARE = 0.75
"""Of the machine's memory, for all workers together."""

PASSED_ON = ("kernel", "subject", "backend")
KEPT = (*PASSED_ON, "shard", "workers", "example_database", "pytest")
"""Options that `--resume` takes from run.json."""


class Stop(BaseException):
    """SIGINT or SIGTERM arrived."""


def parser() -> argparse.ArgumentParser:
    """The command line of fuzz."""
    arguments = argparse.ArgumentParser("python -m ci fuzz", description="Check the kernels on fresh cases for hours.")
    add = arguments.add_argument
    add("--minutes", type=float, required=True, help="how long")
    add("--kernel", action="append", help="dense_mla or sparse_mla (default: all)")
    add("--subject", action="append", metavar="KERNEL=MODULE", help="check this module or .py file instead")
    add("--backend", action="append", help="default: tpu on a TPU host, else interpret and tpu-interpret")
    add("--out", type=Path, metavar="DIR", help="default: .failures/TIME")
    add("--resume", type=Path, metavar="DIR", help="go on with the run in DIR: its options, new rounds")
    add("--workers", type=positive, help="worker processes (default: one a core)")
    add("--seed", type=int, help="default: drawn, and printed")
    add("--shard", type=_shard, metavar="I/N", help="which of N runs with one seed this is, from 1 (default 1/1)")
    add("--example-database", metavar="WHERE", help="share failures through a folder, redis://... or github:OWNER/REPO")
    add("--json", type=Path, metavar="FILE", help="write the result here too")
    add("pytest", nargs="*", metavar="-- ARGS", help="passed on to pytest, as --mutant ID or --time-limit SECONDS")
    return arguments


def _shard(text: str) -> str:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted I/N with 1 <= I <= N")
    return text


def main(arguments: list[str]) -> int:
    """Fuzz: 0 clean, 1 something was found, 2 usage or environment, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        night, held = _resume(options) if options.resume else _begin(options)
    except NightError as error:
        print(f"ci fuzz: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    code = 0
    try:
        code = _rounds(night, held, time.time() + 60 * options.minutes)
        _settle(night)
    except Stop:
        code, night.state = 130, "interrupted"
    except OSError as error:
        code, night.state = 2, f"stopped: {error.strerror or error}"
    return _conclude(night, code, options.json)


def _stop(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Stop


def _begin(options: argparse.Namespace) -> tuple[Night, int]:
    """A new night in a folder of its own."""
    folder = (options.out or ROOT / ".failures" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).resolve()
    held = lock(folder)
    if (folder / "events.jsonl").exists():
        raise NightError(f"{folder}: holds a run already: --resume {folder} goes on with it")
    kept = {name: getattr(options, name) for name in KEPT}
    kept["backend"] = kept["backend"] or (["tpu"] if chips() else ["interpret", "tpu-interpret"])
    kept["shard"] = kept["shard"] or "1/1"
    kept["workers"] = kept["workers"] or os.cpu_count() or 1
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    started = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"options": kept, "seed": seed, "versions": versions(), "device": device(), "started": started}
    return Night(folder, head), held


def _resume(options: argparse.Namespace) -> tuple[Night, int]:
    """The night in a folder that exists."""
    given = [name for name in (*KEPT, "seed", "out") if getattr(options, name)]
    if given:
        raise NightError(f"--resume takes --{given[0].replace('_', '-')} from the run")
    folder = options.resume.resolve()
    if not (folder / "run.json").exists():
        raise NightError(f"{folder}: holds no run")
    held = lock(folder)
    night = Night.load(folder)
    night.state, night.head["versions"] = "running", versions()
    return night, held


def _rounds(night: Night, held: int, deadline: float) -> int:
    """Run rounds until `deadline`; 0, or 2 when rounds fail for a reason of the harness's own."""
    packages = ", ".join(f"{name} {number}" for name, number in night.head["versions"].items())
    print(f"seed {night.head['seed']}, shard {night.head['options']['shard']}; {packages}")
    print(f"writing to {night.folder}", flush=True)
    _settle(night)
    journal, failed = Journal(night.events), 0
    while time.time() < deadline:
        night.rounds += 1
        journal.write("round", round=night.rounds, seed=round_seed(night), versions=night.head["versions"])
        before = night.cases
        code = _round(night, held, journal, deadline)
        if code == DISK_FULL:
            raise OSError(None, "events.jsonl can't be written: is the disk full?")
        if code not in (0, 1) and time.time() < deadline:
            _complain(night, code)
        failed = failed + 1 if night.cases == before and code not in (0, 1) else 0
        if failed == FAILED_ROUNDS or code == 4:  # pytest's code for wrong usage
            night.state = "failed"
            return 2
    night.state = "done"
    return 0


def _complain(night: Night, code: int) -> None:
    log = _log(night)
    print(f"round {night.rounds}: pytest ended with code {code}; the end of {log}:")
    print("\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-5:]), flush=True)


def round_seed(night: Night) -> int:
    """The seed of the current round: a function of the night's seed, its shard and the round's number."""
    text = f"{night.head['seed']}:{night.head['options']['shard']}:{night.rounds}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def _log(night: Night) -> Path:
    return night.folder / "rounds" / f"{night.rounds:05d}.txt"


def round_command(night: Night, deadline: float) -> list[str]:
    """The pytest run of the current round."""
    options = night.head["options"]
    command = [sys.executable, "-m", "pytest", str(ROOT / "properties"), *QUIET, "-m", "differential"]
    command += ["-n", str(options["workers"]), "--dist", "loadgroup", "--max-worker-restart", "1000000"]
    command += [f"--{name}={value}" for name in PASSED_ON for value in options[name] or ()]
    command += [f"--configs={CONFIGS}", f"--examples={EXAMPLES}", f"--seed={round_seed(night)}"]
    command += [
        f"--time-limit={TIME_LIMIT}",
        f"--deadline={deadline}",
        f"--worker-memory={_worker_memory(options['workers']):.2f}",
    ]
    if options["example_database"]:
        command.append(f"--example-database={options['example_database']}")
    command += ["-p", "ci.journal", f"--journal={night.events}", f"--flight={night.folder / 'flight'}"]
    return [*command, f"--junit-xml={_log(night).with_suffix('.xml')}", *options["pytest"]]


def _worker_memory(workers: int) -> float:
    """GB that each worker may take."""
    return MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / workers


def _round(night: Night, held: int, journal: Journal, deadline: float) -> int:
    """Run one round while telling what comes in; pytest's exit code."""
    with _log(night).open("wb") as log:
        process = subprocess.Popen(
            round_command(night, deadline),
            cwd=ROOT, env={**os.environ, "PYTHONPATH": _path()}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[held],
        )  # fmt: skip
        peak, told = 0, time.time()
        try:
            while process.poll() is None:
                time.sleep(0.5)
                _settle(night)
                peak = max(peak, sum(_memory(process.pid)))
                if time.time() - told > PROGRESS_SECONDS:
                    _tell(night, journal, deadline, peak)
                    peak, told = 0, time.time()
                if time.time() > deadline + GRACE_SECONDS:
                    break
        finally:
            _end(process)
            _settle(night)
    return process.returncode


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _end(process: subprocess.Popen) -> None:
    """End a round with all its workers: politely, so that pytest writes its XML, then surely."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _memory(session: int) -> Iterator[int]:
    """Resident bytes of each process of a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            yield int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _settle(night: Night) -> None:
    """Bring run.json and failures/ up to date, and print each new finding."""
    new = night.take()
    for finding in new:
        night.save_failure(finding)
        where = f"{finding['kind'].upper()} in {finding['kernel']} on {finding['backend']}"
        print(f"finding {finding['id']}: {where}: {finding['property']}: {finding['summary']}")
        print(f"  repro: {finding['repro']}", flush=True)
    night.save()


def _tell(night: Night, journal: Journal, deadline: float, peak: int) -> None:
    left = max(0.0, deadline - time.time()) / 60
    counts = f"{night.cases} cases, {len(night.configs)} configs, {len(night.findings)} findings"
    print(f"round {night.rounds}: {counts}; {peak / 2**20:.0f} MB; {left:.1f} min left", flush=True)
    journal.write("progress", cases=night.cases, findings=len(night.findings), peak_mb=peak // 2**20)


def _conclude(night: Night, code: int, path: Path | None) -> int:
    """Write what is left to write, say how it went, and choose the exit code."""
    try:
        night.take()
        night.save()
        if path:
            path.write_text((night.folder / "run.json").read_text())
    except OSError as error:
        code, night.state = code or 2, f"stopped: {error.strerror or error}"
    print(f"{night.state}: {night.cases} cases, {len(night.configs)} configs, {night.rounds} rounds, "
          f"{len(night.findings)} findings, {night.errors} harness errors in {night.folder}")  # fmt: skip
    if code:
        return code
    if not night.cases:
        print("ci fuzz: nothing was checked")
        return 2
    return 1 if night.findings else 2 if night.errors else 0
