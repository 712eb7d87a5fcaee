"""What a run of the properties found: collected from pytest's reports, shown as a table, written as JSON."""

import json
import platform
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from properties.case import SCHEMA
from properties.families import FAMILIES
from properties.plugin import FINDING, RESULT

PACKAGES = ("jax", "jaxlib", "libtpu", "numpy", "ml_dtypes", "hypothesis", "pytest", "pytest-xdist")


@dataclass
class Row:
    """One line of the table: a family of cases on a backend."""

    configs: set[str] = field(default_factory=set)
    cases: int = 0
    failures: int = 0
    unsupported: int = 0
    seconds: float = 0.0
    worst_ratio: float = 0.0

    def plain(self, family: str, subject: str, backend: str) -> dict:
        """The row as the gate's JSON lists it."""
        return {
            "kernel": FAMILIES[family].case.kernel,
            "family": family,
            "subject": subject,
            "backend": backend,
            "configs": len(self.configs),
            "cases": self.cases,
            "failures": self.failures,
            "unsupported": self.unsupported,
            "seconds": round(self.seconds, 2),
            "cases_per_second": round(self.cases / self.seconds, 1) if self.seconds else 0.0,
            "worst_ratio": round(self.worst_ratio, 4),
        }


class Results:
    """A pytest plugin, for the controlling process, that gathers what the stations report."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.findings: list[dict] = []
        self.errors: list[str] = []
        """Items that failed for a reason of the harness's own."""
        self.not_provided: dict[str, set[str]] = defaultdict(set)
        self._rows: dict[tuple[str, str, str], Row] = defaultdict(Row)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one item's report; of equal failures only the first is told in full."""
        properties = dict(report.user_properties)
        result, finding = properties.get(RESULT), properties.get(FINDING)
        if result:
            self._count(result)
            if result["not_provided"]:
                self.not_provided[result["subject"]].add(
                    str(report.longrepr[2]).removeprefix("Skipped: not provided: ")
                )
        if finding:
            if any(_sort(finding) == _sort(known) for known in self.findings):
                report.longrepr = f"{finding['kind'].upper()} again: {finding['summary']}\nrepro: {finding['repro']}"
            self.findings.append(finding)
            family = json.loads(finding["case"])["family"]
            subject = result["subject"] if result else self._subject_of(finding["kernel"])
            self._rows[family, subject, finding["backend"]].failures += 1
        elif report.failed:
            self.errors.append(report.nodeid)

    def _count(self, result: dict) -> None:
        row = self._rows[result["family"], result["subject"], result["backend"]]
        if result["cases"]:
            row.configs.add(result["config"])
        row.cases += result["cases"]
        row.unsupported += result["unsupported"]
        row.seconds += result["seconds"]
        row.worst_ratio = max(row.worst_ratio, result["worst_ratio"])

    def _subject_of(self, kernel: str) -> str:
        """The subject of a worker that died before it could report; there is one for each kernel."""
        return next((subject for known, subject, _ in self._rows if known == kernel), f"kernels.{kernel}")

    def rows(self) -> list[dict]:
        """The table's rows, a kernel's attention before what is built on it."""
        order = list(FAMILIES)
        return [
            row.plain(*key)
            for key, row in sorted(self._rows.items(), key=lambda item: (order.index(item[0][0]), item[0]))
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        write = terminalreporter.write_line
        terminalreporter.section("ragged-oracle")
        rows = self.rows()
        if not rows:
            return
        names = list(rows[0])
        widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
        for cells in (names, *(row.values() for row in rows)):
            write("  ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        for subject, missing in sorted(self.not_provided.items()):
            write(f"not provided by {subject}: {', '.join(sorted(missing))}")
        for nodeid in self.errors:
            write(f"harness error (no verdict on the kernel): {nodeid}")

    def write_json(self, path: Path) -> None:
        """Write the result for scripts; a finding's `details` stay with the person's report."""
        failures = [{key: value for key, value in finding.items() if key != "details"} for finding in self.findings]
        plain = {"schema": SCHEMA, "seed": self.seed, "versions": versions(), "rows": self.rows(), "failures": failures}
        path.write_text(json.dumps(plain, indent=1) + "\n")


def _sort(finding: dict) -> tuple[str, ...]:
    """What equal failures share."""
    return tuple(finding[name] for name in ("kernel", "property", "backend", "kind"))


def versions() -> dict[str, str]:
    """Python and the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
