"""pytest hooks of the differential properties: their items, seeds, results, and the report of a failure."""

import dataclasses
import functools
import gc
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from properties import aot, backends, chip, determinism, findings, flight, session, sharing, subjects
from properties.case import Config, Record, to_plain
from properties.families import CASES, FAMILIES
from properties.reports import FINDING, RESULT
from properties.stations import Property, Station, replays

FLIGHT = "ragged_oracle_flight"
"""Name under which a worker of xdist is told the folder of the cases in flight."""

CHIP = "ragged_oracle_chip"
"""Name under which it is told the address of the process that owns the TPU."""

NOT_PROVIDED = "not provided"
"""How the reason of a skip begins when the subject lacks what the property needs."""


class Differential:
    """The hooks, for one pytest process: the controller of xdist or one of its workers."""

    def __init__(self, config: pytest.Config, plant: Callable[[], object] | None = None) -> None:
        """Check what the user asked for.

        Args:
            config: pytest's.
            plant: has planted the fault of --mutant in this process, and can in another.

        Raises:
            pytest.UsageError: unknown kernel, backend or subject, or one that this machine can't offer.
        """
        self.options = config.option
        given = getattr(config, "workerinput", {})
        worker = given.get("workerid", "main")
        folder = given.get(FLIGHT) or config.option.flight or tempfile.mkdtemp(prefix="ragged-oracle-")
        self.flight_folder = Path(folder)
        airborne = flight.Flight(self.flight_folder, worker, config.option.time_limit)
        load = functools.partial(_load_subjects, config.option.kernel, config.option.subject, config.option.mutant)
        self.chip: chip.Chip | None = None
        try:
            self.subjects = load()
            if chip.NAME in config.option.backend and not given:
                self.chip = chip.Chip(functools.partial(_plant_and_load, plant, load), config.option.time_limit)
            address = self.chip.address if self.chip else given.get(CHIP)
            self.backends = {name: _offer(name, address, airborne) for name in config.option.backend}
        except (subjects.SubjectError, backends.BackendError) as error:
            raise pytest.UsageError(str(error)) from None
        self.session = session.Session(self.subjects, self.backends, airborne)
        if config.option.worker_memory and hasattr(config, "workerinput"):
            limit = int(config.option.worker_memory * 2**30)
            # Of private memory: libraries and what is only reserved don't count, as they would in RLIMIT_AS.
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        session.begin(self.session)
        determinism.pin_hypothesis()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # tracing makes many objects and little garbage: a third of its time was this

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist where this process looks for its case in flight, and where the TPU's owner listens."""
        node.workerinput[FLIGHT] = str(self.flight_folder)
        node.workerinput[CHIP] = self.chip.address if self.chip else None

    def pytest_unconfigure(self) -> None:
        """Let go of the TPU."""
        if self.chip:
            self.chip.close()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """A scheduler that outlives what kernels do to workers."""
        if config.option.dist != "loadgroup":
            return None
        from properties.scheduling import SurvivingScheduling

        return SurvivingScheduling(config, log)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One item for each station of a property, or of a record to replay, on the chosen backends."""
        prop: Property | None = getattr(metafunc.function, "property", None)
        if prop:
            stations = [s for name in self.backends for s in prop.stations(name, self._configs(prop.family))]
        elif "station" in metafunc.fixturenames:
            stations = [s for record in self.records() for s in replays(record, self.backends)]
        else:
            return
        stations = [station for station in stations if station.property.kernel in self.subjects]
        metafunc.parametrize("station", stations, ids=[str(station) for station in stations])

    @functools.cache  # noqa: B019 (one instance a process)
    def _configs(self, family: str) -> tuple[Config, ...] | None:
        """The configs that --configs asks for; None for the menus. They depend on the seed, not on how many follow."""
        if self.options.configs is None:
            return None
        keys = (f"{self.options.seed}:{number}" for number in range(self.options.configs))
        return tuple(dict.fromkeys(determinism.draw(FAMILIES[family].configs(), key) for key in keys))

    def records(self) -> list[Record]:
        """What to replay: the record of --replay, else the regression corpus and what other runs shared."""
        if self.options.replay:
            return [Record.from_json(self.options.replay, CASES)]
        corpus = sorted((Path(__file__).parent / "corpus").glob("*.json"))
        records = [Record.from_json(path.read_text(), CASES) for path in corpus]
        records += sharing.snapshot(self.flight_folder)
        return [record for record in records if record.backend is None or record.backend in self.backends]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the place-holders that pytest makes for properties without a station here."""
        items[:] = [item for item in items if _station(item) or "station" not in getattr(item, "fixturenames", ())]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give the item its seed and a fresh count; skip it, visibly, when time is up or the subject lacks a name."""
        station = _station(item)
        if station is None:
            return
        self.session.tally = type(self.session.tally)()
        if self.options.deadline and time.time() > self.options.deadline:
            pytest.skip("out of time")
        missing = [
            name for name in station.property.needs if name not in self.subjects[station.property.kernel].provided
        ]
        if missing:
            pytest.skip(f"{NOT_PROVIDED}: {', '.join(missing)}")
        if station.case is None and hasattr(item.obj, "hypothesis"):
            key = f"{self.options.seed}:{station.property.family}:{station.property.name}:{station}"
            examples = max(1, round(self.options.examples * station.share))
            determinism.configure(item.obj, key, examples, None, not self.options.no_shrink)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[object]:
        """Let a family make what it found simpler than Hypothesis could."""
        station = _station(pyfuncitem)
        try:
            return (yield)
        except Exception as error:
            found = _discrepancy(error)
            if found is None or station is None or station.case or self.options.no_shrink:
                raise
            raise self.session.simplify(station, found) from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
        """Attach counts and finding to the report, and let a finding speak for itself."""
        report = yield
        station = _station(item)
        if station is None or report.when == "teardown" or (report.when == "setup" and report.passed):
            return report
        report.user_properties.append((RESULT, self._result(station, report)))
        discrepancy = _discrepancy(call.excinfo.value) if call.excinfo else None
        if discrepancy:
            report.user_properties.append((FINDING, dataclasses.asdict(discrepancy.finding)))
            report.longrepr = str(discrepancy.finding)
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A worker died: its case in flight is the finding."""
        found = wrecked(self.flight_folder, report.node.gateway.id, self.options.time_limit)
        if found is None:
            return
        record = Record.from_json(found.case, CASES)
        if f"{record.backend}-{record.case.config}" not in crashitem:
            return  # it died before its item made a case
        report.user_properties = [(FINDING, dataclasses.asdict(found))]
        report.longrepr = str(found)

    def _result(self, station: Station, report: pytest.TestReport) -> dict:
        tally = self.session.tally
        return {
            "kernel": station.property.kernel,
            "family": station.property.family,
            "subject": self.subjects[station.property.kernel].name,
            "backend": station.backend,
            "property": station.property.name,
            "config": str(station.config),
            "options": to_plain(station.config),
            "replayed": _record(station).to_json() if station.case else None,
            "cases": tally.cases,
            "unsupported": tally.unsupported,
            "not_provided": report.skipped and NOT_PROVIDED in str(report.longrepr),
            "seconds": report.duration,
            "parts": dict(tally.seconds),
            "worst_ratio": tally.worst_ratio,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }


def wrecked(folder: Path, worker: str, limit: float) -> findings.Finding | None:
    """The finding of a worker that died: it took longer than `limit` seconds for the case in flight, or was killed."""
    left = flight.wreck(folder, worker)
    if left is None:
        return None
    text, choose, kind = left
    took = f"took longer than {limit:g} s" if kind == "hang" else "killed its process"
    return findings.finding(Record.from_json(text, CASES), choose, kind, f"the call {took}")


def _station(item: pytest.Item) -> Station | None:
    station = item.callspec.params.get("station") if hasattr(item, "callspec") else None
    return station if isinstance(station, Station) else None


def _record(station: Station) -> Record:
    return Record(station.case, station.property.name, station.backend)


def _discrepancy(error: BaseException) -> findings.Discrepancy | None:
    """The discrepancy that `error` is, or that Hypothesis wrapped when a failure did not repeat."""
    if isinstance(error, findings.Discrepancy):
        return error
    inner = [*getattr(error, "exceptions", ()), *filter(None, (error.__cause__, error.__context__))]
    return next((found for found in map(_discrepancy, inner) if found), None)


def _offer(name: str, chip_address: str | None, airborne: flight.Flight) -> backends.Backend | None:
    if name == aot.BACKEND:
        aot.require_libtpu()
        return None
    if name == chip.NAME:
        return chip.Remote(chip_address, airborne)
    if name not in backends.RUNNERS:
        known = ", ".join([*backends.RUNNERS, aot.BACKEND])
        raise backends.BackendError(f"unknown backend {name!r}: wanted one of {known}")
    return backends.RUNNERS[name]()


def _plant_and_load(
    plant: Callable[[], object] | None, load: Callable[[], dict[str, subjects.Subject]]
) -> dict[str, subjects.Subject]:
    """What the process that owns a TPU does to have the subjects of this one."""
    if plant:
        plant()
    return load()


def _load_subjects(kernels: list[str], replaced: list[str], mutant: str | None) -> dict[str, subjects.Subject]:
    """The subject of every kernel to check: those named, else those of `replaced` (KERNEL=MODULE), else all of ours."""
    modules: dict[str, str] = {}
    for text in replaced:
        kernel, _, module = text.partition("=")
        if not module:
            raise subjects.SubjectError(f"--subject: found {text!r}, wanted KERNEL=MODULE")
        modules[kernel] = module
    chosen = kernels or list(modules) or sorted({case.kernel for case in CASES.values()})
    left_out = sorted(set(modules) - set(chosen))
    if left_out:
        raise subjects.SubjectError(f"--subject {left_out[0]}=...: --kernel leaves {left_out[0]} out")
    loaded = {kernel: subjects.load(kernel, modules.get(kernel)) for kernel in chosen}
    return {kernel: subject.planted(mutant) for kernel, subject in loaded.items()} if mutant else loaded
