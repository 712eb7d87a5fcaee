"""`python -m ci repro`: replay one case and say whether it still fails."""

import argparse
import dataclasses
import sys
from pathlib import Path

import pytest

from ci import plot
from ci.gate import EXIT_CODES, QUIET, ROOT
from ci.mutants import planting
from ci.night import identity
from ci.results import Results
from properties import subjects
from properties.case import CaseError, Record
from properties.determinism import draw
from properties.families import CASES, FAMILIES

MINIMIZE_SECONDS = 120

CORPUS = ROOT / "properties" / "corpus"

TEST = '''"""Replays one recorded case: keep it in properties/."""

import properties.test_corpus  # noqa: F401 (fills the table of properties)
from properties import session
from properties.case import Record
from properties.families import CASES
from properties.stations import replays

RECORD = """{record}"""


def test_{name}() -> None:
    """{words}."""
    for station in replays(Record.from_json(RECORD, CASES), ["{backend}"]):
        session.current().replay(station, 0)
'''
"""What `--as-test` prints."""


def parser() -> argparse.ArgumentParser:
    """The command line of repro."""
    arguments = argparse.ArgumentParser(
        "python -m ci repro", description="Replay one case: exit 1 if it fails, 0 if it passes."
    )
    add = arguments.add_argument
    add("case", help="a failure's file, '-' for stdin, JSON as a failure prints it, or KERNEL:SEED")
    add(
        "--subject",
        action="append",
        default=[],
        metavar="KERNEL=MODULE",
        help="this module or .py file, not our kernel",
    )
    add("--failure", metavar="ID", help="the failure with this id, where the case is the run.json of a fuzz run")
    add("--minimize", action="store_true", help=f"search {MINIMIZE_SECONDS} s for a smaller case that fails alike")
    add("--as-test", action="store_true", help="print a pytest function that holds the case, and stop")
    add("--promote", metavar="ID", help="add the case to the regression corpus as ID.json, and stop")
    add("--plot", type=Path, metavar="FILE.png", help="draw errors, weights and page layout (needs matplotlib)")
    add("--mutant", metavar="ID", help="plant this known fault in our kernel first")
    add("--backend", help="interpret, tpu-interpret, compile or tpu (default: the recorded one, else interpret)")
    return arguments


def read(source: str) -> Record:
    """The record that `source` stands for: a file, '-', JSON, or FAMILY:SEED.

    Raises:
        CaseError: it can't be read; the message is one line.
    """
    family, _, seed = source.partition(":")
    if source.lstrip().startswith("{"):
        return Record.from_json(source, CASES)
    if source == "-":
        return Record.from_json(sys.stdin.read(), CASES)
    if family in FAMILIES and seed.isdigit():
        return Record(from_seed(family, int(seed)))
    if not Path(source).is_file():
        raise CaseError(f"no such file, and not FAMILY:SEED with a family of {', '.join(FAMILIES)}")
    try:
        return Record.from_json(Path(source).read_text(), CASES)
    except UnicodeDecodeError:
        raise CaseError("not a text file") from None


def read_failure(run: Path, failure: str) -> Record:
    """The record of one failure of a fuzz run, whose run.json is given.

    Raises:
        CaseError: no such run or failure; the message is one line.
    """
    path = run.parent / "failures" / f"{failure}.json"
    if not run.is_file() or not path.is_file():
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.json"))) or "none"
        raise CaseError(f"no failure {failure!r} beside it: known are {known}")
    return Record.from_json(path.read_text(), CASES)


def from_seed(family: str, seed: int):  # noqa: ANN201
    """The case that `seed` stands for: drawn from the full product of configs."""
    kind = FAMILIES[family]
    return draw(kind.configs().flatmap(kind.cases), seed)


def main(arguments: list[str]) -> int:
    """Replay; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        record = read_failure(Path(options.case), options.failure) if options.failure else read(options.case)
    except CaseError as error:
        print(f"ci repro: {options.case[:60]}: {error}", file=sys.stderr)
        return 2
    record = dataclasses.replace(record, backend=options.backend or record.backend or "interpret")
    if options.as_test:
        print(as_test(record))
        return 0
    if options.promote:
        return promote(record, options.promote)
    print(f"digest: {record.case.inputs().digest()}", flush=True)
    results = Results(seed=0)
    command = [str(ROOT / "properties" / "test_corpus.py"), *QUIET, "-n", "1", "--max-worker-restart", "10000"]
    command += [f"--replay={record.to_json()}", f"--backend={record.backend}"]
    command += [f"--kernel={record.case.kernel}", *(f"--subject={subject}" for subject in options.subject)]
    command += [f"--mutant={options.mutant}"] if options.mutant else []
    command += [f"--minimize={MINIMIZE_SECONDS}"] if options.minimize else []
    code = pytest.main(command, plugins=[results])
    verdict = {0: "passes now", 1: "still fails"}.get(EXIT_CODES.get(code, 2), "no verdict")
    print(f"verdict: {verdict}")
    if options.plot and EXIT_CODES.get(code, 2) != 2:
        return _plot(record, results, options) or EXIT_CODES[code]
    return EXIT_CODES.get(code, 2)


def as_test(record: Record) -> str:
    """A pytest module with the case inline."""
    what = record.property or "every_property"
    name = f"{record.case.family}_{what}_{identity(record.to_json())}"
    words = f"{what.replace('_', ' ').capitalize()}, on {record.backend}"
    return TEST.format(record=record.to_json(), name=name, words=words, backend=record.backend)


def promote(record: Record, name: str) -> int:
    """Add a record to the regression corpus; the exit code."""
    path = CORPUS / f"{name}.json"
    if path.exists() or not name.replace("-", "_").isidentifier():
        print(f"ci repro: --promote {name}: wanted a new name of letters, digits, - and _", file=sys.stderr)
        return 2
    CORPUS.mkdir(exist_ok=True)
    path.write_text(record.to_json() + "\n")
    print(f"added {path.relative_to(ROOT)}: every gate replays it first")
    return 0


def _plot(record: Record, results: Results, options: argparse.Namespace) -> int:
    """Draw the case, the smaller one if one was found; 0, or 2 when there is no picture."""
    killed = {"crash", "hang"} & {finding["kind"] for finding in results.findings}
    if killed:
        print(f"ci repro: --plot: no picture of a {killed.pop()}", file=sys.stderr)
        return 2
    if results.findings:
        record = Record.from_json(results.findings[0]["case"], CASES)
    try:
        if options.mutant:
            planting.plant(options.mutant)
        modules = dict(text.split("=", 1) for text in options.subject)
        plot.plot(record, subjects.load(record.case.kernel, modules.get(record.case.kernel)), options.plot)
    except (plot.PlotError, planting.MutantError, OSError) as error:
        print(f"ci repro: --plot: {error}", file=sys.stderr)
        return 2
    print(f"picture: {options.plot}")
    return 0
