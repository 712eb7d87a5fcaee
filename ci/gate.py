"""`python -m ci gate`: a thin caller of pytest on the differential properties; a table, and JSON for scripts."""

import argparse
import os
from pathlib import Path

import pytest

from ci.results import Results, versions

ROOT = Path(__file__).resolve().parent.parent

EXIT_CODES = {pytest.ExitCode.OK: 0, pytest.ExitCode.TESTS_FAILED: 1, pytest.ExitCode.INTERRUPTED: 130}
"""pytest's exit code to ours; anything else is usage or environment, 2."""


def parser() -> argparse.ArgumentParser:
    """The gate's command line."""
    arguments = argparse.ArgumentParser("python -m ci gate", description="Check the kernels against their oracles.")
    add = arguments.add_argument
    add("--kernel", action="append", default=[], help="dense_mla or sparse_mla (default: all)")
    add("--subject", action="append", default=[], metavar="KERNEL=MODULE", help="check this module or .py file instead")
    add(
        "--backend",
        action="append",
        default=[],
        help="interpret, tpu-interpret, compile, tpu (default: the first three)",
    )
    add("--examples", type=positive, default=80, help="cases a config and property (default 80)")
    add("--seed", type=int, default=0, help="seed of every draw (default 0)")
    add("--workers", type=positive, default=os.cpu_count(), help="worker processes (default: one a core)")
    add("pytest", nargs="*", metavar="-- ARGS", help="passed on to pytest")
    add("--json", type=Path, help="write the result here")
    add("--junit", type=Path, help="write JUnit XML here")
    return arguments


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text}, wanted at least 1")
    return value


QUIET = ["-q", "--no-header", "--disable-warnings", "-rN", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
"""pytest's report without what a finding or the table says better."""


def pytest_arguments(options: argparse.Namespace) -> list[str]:
    """pytest's command line for a gate with these options."""
    command = [str(ROOT / "properties"), *QUIET, "-m", "differential"]
    command += ["--dist", "loadgroup", "--max-worker-restart", "10000", "-n", str(options.workers)]
    for name in ("kernel", "subject", "backend"):
        command += [f"--{name}={value}" for value in getattr(options, name)]
    command += [f"--examples={options.examples}", f"--seed={options.seed}"]
    command += [f"--junit-xml={options.junit}"] if options.junit else []
    return command + options.pytest


def main(arguments: list[str]) -> int:
    """Run the gate; returns the exit code."""
    options = parser().parse_args(arguments)
    for path in filter(None, (options.json, options.junit)):
        if not path.resolve().parent.is_dir():
            print(f"ci gate: {path}: no such folder")
            return 2
    results = Results(options.seed)
    print(f"seed {options.seed}; " + ", ".join(f"{name} {number}" for name, number in versions().items()), flush=True)
    code = pytest.main(pytest_arguments(options), plugins=[results])
    if options.json and code in EXIT_CODES:
        results.write_json(options.json)
    unchecked = [row for row in results.rows() if row["unsupported"] and row["unsupported"] == row["cases"]]
    for row in unchecked:
        print(f"ci gate: nothing was checked: {row['backend']} can't run any case of {row['subject']}")
    if results.findings:  # pytest says "interrupted" when -x ends a run at the first
        return 1
    return 2 if results.errors or unchecked else EXIT_CODES.get(code, 2)
