"""`python -m ci mutants`: plant each known fault in memory and see whether, where and how soon the gate finds it."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ci.gate import positive
from ci.mutants.looking import first_finding, reuse_compiled_functions
from ci.mutants.planting import ROOT, Mutant, MutantError, load

BACKENDS = ("interpret", "tpu-interpret", "compile")


@dataclass(frozen=True)
class Sight:
    """What became of one mutant."""

    id: str
    kind: str
    seen: bool
    backend: str
    property: str
    finding: str
    """Kind of the finding."""
    seconds: float
    repro: str
    repro_holds: bool | None
    """Whether the printed line fails with the fault and passes without it; None when not tried."""


def parser() -> argparse.ArgumentParser:
    """The command line of mutants."""
    arguments = argparse.ArgumentParser("python -m ci mutants", description="Does the gate see the faults it should?")
    add = arguments.add_argument
    add("ids", nargs="*", metavar="ID", help="only these (default: all)")
    add("--kernel", help="only this kernel's")
    add("--list", action="store_true", help="name the mutants and stop")
    add("--verify", action="store_true", help="also run each printed repro line, with the fault and without it")
    add("--time-limit", type=positive, default=60, help="seconds to the first sight (default 60)")
    add("--call-limit", type=positive, default=20, help="seconds a call may take before it is a hang (default 20)")
    add("--workers", type=positive, default=os.cpu_count(), help="mutants at a time (default: one a core)")
    add("--json", type=Path, help="write the result here")
    return arguments


def main(arguments: list[str]) -> int:
    """Run the chosen mutants: 0 when all were seen, 1 when one was not, 2 on wrong usage or an edit that fits not."""
    options = parser().parse_args(arguments)
    try:
        chosen = _choose(options)
        for mutant in chosen:
            mutant.source()
    except MutantError as error:
        print(f"ci mutants: {error}", file=sys.stderr)
        return 2
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id:<6} {mutant.kernel:<11} {mutant.kind:<9} {mutant.models}")
        return 0
    real = [mutant for mutant in chosen if not mutant.equivalent]
    with tempfile.TemporaryDirectory() as compiled, ThreadPoolExecutor(options.workers) as pool:
        reuse_compiled_functions(Path(compiled))
        sights = []
        for sight in pool.map(lambda mutant: _look(mutant, options), real):
            _print(sight)
            sights.append(sight)
    return _conclude(chosen, sights, options.json)


def _choose(options: argparse.Namespace) -> list[Mutant]:
    mutants = load()
    unknown = sorted(set(options.ids) - set(mutants))
    if unknown:
        raise MutantError(f"unknown mutant {unknown[0]!r}: `python -m ci mutants --list` names them")
    asked = [mutant for mutant in mutants.values() if not options.ids or mutant.id in options.ids]
    return [mutant for mutant in asked if options.kernel in (None, mutant.kernel)]


def _look(mutant: Mutant, options: argparse.Namespace) -> Sight:
    """Look until the first finding: first where the entry expects it, then at all properties, backend by backend."""
    start = time.monotonic()
    looks = [(backend, "") for backend in sorted(BACKENDS, key=lambda name: name != mutant.look_first)]
    if mutant.look_at:
        looks.insert(0, (mutant.look_first, mutant.look_at))
    for backend, prop in looks:
        left = options.time_limit - (time.monotonic() - start)
        found = first_finding(mutant, backend, prop, left, options.call_limit) if left > 0 else None
        if found:
            seconds = time.monotonic() - start
            holds = _repro_holds(found["repro"]) if options.verify else None
            names = (found["backend"], found["property"], found["kind"])
            return Sight(mutant.id, mutant.kind, True, *names, round(seconds, 1), found["repro"], holds)
    return Sight(mutant.id, mutant.kind, False, "", "", "", round(time.monotonic() - start, 1), "", None)


def _repro_holds(line: str) -> bool:
    """Whether the printed line exits 1 as it stands and 0 without the fault."""
    command = [sys.executable, *shlex.split(line)[1:]]
    fault = command.index("--mutant")
    without = command[:fault] + command[fault + 2 :]
    codes = [subprocess.run(c, cwd=ROOT, capture_output=True, check=False).returncode for c in (command, without)]
    return codes == [1, 0]


def _print(sight: Sight) -> None:
    where = f"{sight.backend:<13} {sight.property:<34} {sight.finding:<10}" if sight.seen else "NOT SEEN"
    repro = {True: "repro holds", False: "REPRO FAILS", None: ""}[sight.repro_holds]
    print(f"{sight.id:<6} {sight.kind:<9} {sight.seconds:>5.1f} s  {where} {repro}".rstrip(), flush=True)


def _conclude(chosen: list[Mutant], sights: list[Sight], path: Path | None) -> int:
    for mutant in chosen:
        if mutant.equivalent:
            print(f"{mutant.id:<6} {mutant.kind:<9} equivalent: {mutant.equivalent}")
    seen = [sight for sight in sights if sight.seen]
    median = sorted(sight.seconds for sight in seen)[len(seen) // 2] if seen else 0.0
    print(f"{len(seen)} of {len(sights)} seen; median {median:.1f} s to the first sight")
    if path:
        path.write_text(json.dumps({"schema": 1, "mutants": [asdict(sight) for sight in sights]}, indent=1) + "\n")
    broken = [sight for sight in sights if not sight.seen or sight.repro_holds is False]
    return 1 if broken else 0
