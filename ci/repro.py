"""`python -m ci repro`: replay one case and say whether it still fails."""

import argparse
import dataclasses
import sys
from pathlib import Path

import pytest

from ci.gate import EXIT_CODES, QUIET, ROOT
from ci.results import Results
from properties.case import CaseError, Record
from properties.determinism import draw
from properties.families import CASES, FAMILIES


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


def from_seed(family: str, seed: int):  # noqa: ANN201
    """The case that `seed` stands for: drawn from the full product of configs."""
    kind = FAMILIES[family]
    return draw(kind.configs().flatmap(kind.cases), seed)


def main(arguments: list[str]) -> int:
    """Replay; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        record = read(options.case)
    except CaseError as error:
        print(f"ci repro: {options.case[:60]}: {error}", file=sys.stderr)
        return 2
    record = dataclasses.replace(record, backend=options.backend or record.backend or "interpret")
    print(f"digest: {record.case.inputs().digest()}", flush=True)
    results = Results(seed=0)
    command = [str(ROOT / "properties" / "test_corpus.py"), *QUIET, "-n", "1", "--max-worker-restart", "10000"]
    command += [f"--replay={record.to_json()}", f"--backend={record.backend}"]
    command += [f"--kernel={record.case.kernel}", *(f"--subject={subject}" for subject in options.subject)]
    command += [f"--mutant={options.mutant}"] if options.mutant else []
    code = pytest.main(command, plugins=[results])
    verdict = {0: "passes now", 1: "still fails"}.get(EXIT_CODES.get(code, 2), "no verdict")
    print(f"verdict: {verdict}")
    return EXIT_CODES.get(code, 2)
