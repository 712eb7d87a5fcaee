"""Fault drill: whatever a kernel does to its process becomes one finding of the right kind, and the run goes on."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from properties import sharing, subjects
from properties.case import CaseError, Record
from properties.determinism import draw
from properties.families import CASES, FAMILIES

ROOT = Path(__file__).resolve().parent.parent

DRILL = '''
"""Goes wrong in the way that sm_scale names."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def die():
    os._exit(3)


def loop():
    while True:
        pass


def fail():
    raise RuntimeError("as planted")


def hoard():
    blocks = []
    while True:
        blocks.append(np.ones(2**25))


def starve():
    def kernel(out, semaphore):
        pl.semaphore_wait(semaphore, 1)
        out[...] = jnp.zeros_like(out)

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return pl.pallas_call(kernel, out_shape=shape, scratch_shapes=[pltpu.SemaphoreType.REGULAR])()


def mla_ragged_paged_attention(*arrays, sm_scale, **options):
    return {1: die, 2: loop, 3: fail, 4: hoard, 5: starve}[int(sm_scale)]()
'''

EXPECTED = {
    1: ("crash", "killed its process"),
    2: ("hang", "took longer than 45 s"),
    3: ("crash", "RuntimeError: as planted"),
    4: ("crash", "MemoryError"),
    5: ("hang", ""),
}
"""By sm_scale: the kind of the finding, and what its summary says."""

FAILING = """
def mla_ragged_paged_attention(*arrays, **options):
    raise RuntimeError("as planted")
"""


STAND_IN = """
import functools

from properties import chip

chip.Chip = functools.partial(chip.Chip, runner="interpret")
"""
"""A pytest plugin that puts an interpreter in the place of the TPU."""


def drilled(numbers: Iterable[int] = tuple(EXPECTED), backend: str | None = None) -> list[Record]:
    """A record for each fault, on `backend` or where it shows."""
    family = FAMILIES["dense_mla"]
    blank = family.blank(family.menu[0])
    backends = {number: backend or ("tpu-interpret" if number == 5 else "interpret") for number in numbers}
    configs = {number: dataclasses.replace(blank.config, sm_scale=float(number)) for number in numbers}
    cases = {number: dataclasses.replace(blank, config=config) for number, config in configs.items()}
    return [Record(case, "equals_the_oracle", backends[number]) for number, case in cases.items()]


def healthy(backend: str = "interpret") -> list[Record]:
    """Records of the other kernel, which must go on."""
    family = FAMILIES["sparse_mla"]
    return [Record(draw(family.cases(config), 0), "equals_the_oracle", backend) for config in family.menu[:2]]


def events(path: Path, kind: str) -> list[dict]:
    """The journal's events of one kind; the last line may be half written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def environment() -> dict[str, str]:
    """Of a child process that finds the project's packages."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def drill(folder: Path, faults: list[Record], others: list[Record], *arguments: str) -> None:
    """Replay faults beside healthy cases in one run: each fault must become its finding, and no other case one."""
    subject, journal = folder / "drill.py", folder / "events.jsonl"
    subject.write_text(DRILL)
    database = DirectoryBasedExampleDatabase(folder / "examples")
    for kernel, module, records in (("dense_mla", str(subject), faults), ("sparse_mla", None, others)):
        key = sharing.key(subjects.load(kernel, module))
        for record in records:
            database.save(key, record.to_json().encode())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-n", "2"]
    command += ["--max-worker-restart", "100", "--dist", "loadgroup", "--kernel=dense_mla", "--kernel=sparse_mla"]
    command += [f"--subject=dense_mla={subject}", f"--example-database={folder / 'examples'}", "--time-limit=45"]
    command += ["-p", "ci.journal", f"--journal={journal}", *arguments, str(ROOT / "properties" / "test_corpus.py")]
    path = os.pathsep.join((str(ROOT), str(folder)))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    found = [event for event in events(journal, "finding") if event["kernel"] == "dense_mla"]
    seen = {int(json.loads(event["case"])["case"]["config"]["sm_scale"]): event for event in found}
    assert len(found) == len(seen) == len(faults), done.stdout + done.stderr
    for number, finding in seen.items():
        kind, words = EXPECTED[number]
        assert finding["kind"] == kind
        assert words in finding["summary"]
    sparse = [event for event in events(journal, "station") if event["kernel"] == "sparse_mla"]
    assert sum(event["cases"] for event in sparse) >= len(others), done.stdout + done.stderr
    assert not [event for event in events(journal, "finding") if event["kernel"] == "sparse_mla"]


def test_each_fault_is_one_finding_and_the_other_kernel_goes_on(tmp_path: Path) -> None:
    """Five subjects' worth of faults in one run, beside healthy cases."""
    drill(tmp_path, drilled(), healthy(), "--backend=interpret", "--backend=tpu-interpret", "--worker-memory=3")


def test_the_owner_of_the_chip_is_replaced(tmp_path: Path) -> None:
    """Calls that kill or hang the one process that owns the TPU, or raise in it, are findings; the other calls run."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    drill(tmp_path, drilled((1, 2, 3), "tpu"), healthy("tpu"), "--backend=tpu", "-p", "stand_in")


@pytest.fixture
def night(tmp_path: Path):  # noqa: ANN201
    """A fuzz run that finds something every second, in tmp_path/night."""
    subject = tmp_path / "failing.py"
    subject.write_text(FAILING)
    command = [sys.executable, "-m", "ci", "fuzz", "--minutes=5", f"--subject=dense_mla={subject}", "--workers=2"]
    command += ["--backend=interpret", "--seed=1", f"--out={tmp_path / 'night'}"]
    command += [f"--example-database={tmp_path / 'examples'}"]
    command += ["--", "--no-shrink"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    yield process
    for pid in [process.pid, *family_of(process.pid)]:
        with_signal(pid, signal.SIGKILL)
    process.wait()


def family_of(parent: int) -> list[int]:
    """Every process that descends from `parent`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found += [int(stat.parent.name), *family_of(int(stat.parent.name))]
    return found


def with_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for(journal: Path, count: int) -> list[dict]:
    """The findings, once there are `count`."""
    end = time.monotonic() + 300
    while len(found := events(journal, "finding")) < count:
        assert time.monotonic() < end, f"{len(found)} findings"
        time.sleep(0.2)
    return found


def test_kills_lose_no_recorded_event(night: subprocess.Popen, tmp_path: Path) -> None:
    """A worker killed is replaced; a run killed leaves whole lines; meanwhile nobody else may write to the folder."""
    folder, journal = tmp_path / "night", tmp_path / "night" / "events.jsonl"
    wait_for(journal, 1)
    second = [sys.executable, "-m", "ci", "fuzz", "--minutes=1"]
    for option in (f"--out={folder}", f"--resume={folder}"):
        refused = subprocess.run([*second, option], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert refused.returncode == 2
        assert "another fuzz run holds this folder" in refused.stderr
    end = time.monotonic() + 60
    while len(family := family_of(night.pid)) < 2 and time.monotonic() < end:  # between rounds there is no worker
        time.sleep(0.1)
    controller, *workers = family
    with_signal(workers[0], signal.SIGKILL)
    before = wait_for(journal, len(events(journal, "finding")) + 2)
    descendants = family_of(night.pid)
    for pid in (night.pid, controller, *descendants):
        with_signal(pid, signal.SIGKILL)
    night.wait()
    after = events(journal, "finding")
    assert after[: len(before)] == before
    assert {event["case"] for event in after} >= {event["case"] for event in before}


def test_sigterm_leaves_results_that_can_be_read(night: subprocess.Popen, tmp_path: Path) -> None:
    """A run told to stop says so, and each failure it lists is a case that can be replayed."""
    folder = tmp_path / "night"
    wait_for(folder / "events.jsonl", 1)
    night.terminate()
    output = night.communicate(timeout=60)[0].decode()
    assert night.returncode == 130, output
    run = json.loads((folder / "run.json").read_text())
    assert run["state"] == "interrupted"
    assert run["findings"]
    for finding in run["findings"]:
        assert finding["kind"] == "crash"
        assert finding["id"] in output
        Record.from_json((folder / "failures" / f"{finding['id']}.json").read_text(), CASES)
    assert family_of(night.pid) == []


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    """When an event can't be written, pytest stops with an exit code of its own and says why."""
    subject = tmp_path / "failing.py"
    subject.write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-p", "ci.journal"]
    command += ["--journal=/dev/full", f"--subject=dense_mla={subject}", "--backend=interpret"]
    command += [f"--replay={drilled()[0].to_json()}", str(ROOT / "properties" / "test_corpus.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 20, done.stdout + done.stderr
    assert "No space left on device" in done.stdout + done.stderr


def test_records_of_another_schema_are_told_apart() -> None:
    """An older or newer file says which it is."""
    record = json.loads(healthy()[0].to_json())
    for schema, word in ((0, "older"), (99, "newer")):
        with pytest.raises(CaseError, match=word):
            Record.from_json(json.dumps({**record, "schema": schema}), CASES)
