"""`python -m ci bench`: checked cases a second and core, where the time goes, and the same cases with a trace each.

`--compile` prints instead what the TPU compiler says of every config: seconds, memory and its own cost figures.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, seed
from hypothesis import strategies as st

import properties.test_dense_mla  # these fill the table of properties
import properties.test_serving
import properties.test_sparse_mla
import properties.test_sparse_prefill  # noqa: F401
from ci.gate import positive
from properties import aot, backends, determinism, subjects
from properties.case import Config
from properties.families import FAMILIES
from properties.flight import Flight
from properties.session import Session
from properties.stations import PROPERTIES, Property, Station
from properties.trial import Tally

PARTS = ("draw", "arrays", "kernel", "oracle", "compare")

MEASURED_PROPERTIES = ("equals_the_oracle", "matches_the_model")
"""How the names end of the properties that are measured: one a family."""

MEASURED = 4
"""Configs a family that are measured: the first of its menu."""

SHARES = {"interpret": 1.0, "tpu-interpret": 0.05}
"""Cases a backend, as a share of --examples."""

PEERS_CASES = 3
"""Cases a config that are run with a fresh trace each: they are slow."""


def parser() -> argparse.ArgumentParser:
    """The command line of bench."""
    arguments = argparse.ArgumentParser("python -m ci bench", description="How fast are cases checked, on one core?")
    add = arguments.add_argument
    add("--kernel", action="append", default=[], help="only this kernel")
    add("--examples", type=positive, default=300, help="cases a config on interpret (default 300)")
    add("--compile", action="store_true", help="the TPU compiler's figures for each config instead")
    add("--json", type=Path, help="write the result here")
    return arguments


def main(arguments: list[str]) -> int:
    """Measure; returns the exit code."""
    options = parser().parse_args(arguments)
    rows = []
    for row in compiler_rows(options) if options.compile else speed_rows(options):
        if not rows:
            print("  ".join(f"{name:>{len(_text(value))}}" for name, value in row.items()))
        print("  ".join(f"{_text(value):>{len(name)}}" for name, value in row.items()), flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
    return 0


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def speed_rows(options: argparse.Namespace) -> Iterator[dict]:
    """One row a config and backend: cases a second, milliseconds a case by part, and the factor over the peers' way."""
    for prop in PROPERTIES.values():
        if not prop.name.endswith(MEASURED_PROPERTIES) or (options.kernel and prop.kernel not in options.kernel):
            continue
        for backend, share in SHARES.items():
            for config in FAMILIES[prop.family].menu[:MEASURED]:
                yield measure(Station(prop, backend, config), max(3, round(options.examples * share)))


def measure(station: Station, examples: int) -> dict:
    """Check `examples` cases of a station on this core, once warm; then a few with a fresh trace each."""
    run = _session(station.property, station.backend)
    _check(run, station, 2)  # compiles
    run.tally = Tally()
    seconds = _check(run, station, examples)
    parts, cases = dict(run.tally.seconds), run.tally.cases
    parts["draw"] = seconds - sum(value for part, value in parts.items() if part != "draw")  # Hypothesis' engine too
    peers = peers_seconds(run, station)
    return {
        "family": f"{station.property.family:<10}",
        "backend": f"{station.backend:<13}",
        "cases": cases,
        "cases/s": cases / seconds,
        **{f"{part} ms": 1000 * parts.get(part, 0.0) / cases for part in PARTS},
        "fresh trace ms": 1000 * peers,
        "factor": peers * cases / seconds,
        "RSS MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "config": str(station.config),
    }


def _session(prop: Property, backend: str) -> Session:
    flight = Flight(Path(tempfile.mkdtemp()), "bench", 600.0)
    determinism.pin_hypothesis()
    return Session({prop.kernel: subjects.load(prop.kernel)}, {backend: backends.RUNNERS[backend]()}, flight)


def _check(run: Session, station: Station, examples: int) -> float:
    """Seconds to draw and check so many cases."""

    @determinism.profile(examples, None, shrink=False)
    @seed(0)
    @given(st.data())
    def cases(data: st.DataObject) -> None:
        run.run(station, data)

    start = time.perf_counter()
    cases()
    return time.perf_counter() - start


def peers_seconds(run: Session, station: Station) -> float:
    """Seconds a case when each call is traced and compiled afresh, as published suites do."""
    cases = FAMILIES[station.property.family].cases(station.config)
    drawn = [determinism.draw(cases, key) for key in range(PEERS_CASES)]
    start = time.perf_counter()
    for case in drawn:
        backends.free_compiled_functions()
        run.hold(station.property, case, station.backend)
    return (time.perf_counter() - start) / len(drawn)


def compiler_rows(options: argparse.Namespace) -> Iterator[dict]:
    """One row a config and TPU: compile seconds, VMEM, and the compiler's own cost figures."""
    for prop in PROPERTIES.values():
        if aot.BACKEND not in prop.plans or (options.kernel and prop.kernel not in options.kernel):
            continue
        subject = subjects.load(prop.kernel)
        for station in prop.stations(aot.BACKEND):
            inputs = station.config.abstract()
            for target in aot.TARGETS:
                yield compiler_row(subject, inputs.entry, station.config, target)


def compiler_row(subject: subjects.Subject, entry: str, config: Config, target: str) -> dict:
    """What the compiler says of one config on one TPU."""
    start = time.perf_counter()
    compiled = aot.compile_for(subject.function(entry), config.abstract(), target)
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "TPU": f"{target:<5}",
        "compile s": seconds,
        "HBM temp KB": memory.temp_size_in_bytes / 1024,
        "HBM arguments MB": memory.argument_size_in_bytes / 2**20,
        "aliased MB": memory.alias_size_in_bytes / 2**20,
        "code KB": memory.generated_code_size_in_bytes / 1024,
        "GFLOP": cost.get("flops", 0.0) / 1e9,
        "MB accessed": cost.get("bytes accessed", 0.0) / 1e6,
        "config": str(config),
    }
