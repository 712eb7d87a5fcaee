"""Failures shared through Hypothesis' example databases: a folder, a Redis server, a GitHub artifact."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis.database import InMemoryExampleDatabase, MultiplexedDatabase

from properties import sharing, subjects
from properties.case import Record
from properties.families import FAMILIES
from properties.reports import FINDING, RESULT

ROOT = Path(__file__).resolve().parent.parent


class Report:
    """As much of a pytest report as the hooks read."""

    def __init__(self, passed: bool, **properties: dict) -> None:
        names = {"finding": FINDING, "result": RESULT}
        self.passed, self.user_properties = passed, [(names[name], value) for name, value in properties.items()]


def record(number: int) -> Record:
    """One of several records, all different."""
    family = FAMILIES["dense_mla"]
    return Record(family.blank(family.menu[number]), "equals_the_oracle", "interpret")


def failed(case: Record) -> Report:
    """The report of an item that found something."""
    return Report(False, finding={"kernel": "dense_mla", "case": case.to_json()})


def passed(case: Record) -> Report:
    """The report of a replayed case that is right now."""
    return Report(True, result={"kernel": "dense_mla", "replayed": case.to_json(), "cases": 1, "unsupported": 0})


@pytest.fixture
def subject() -> subjects.Subject:
    """Our dense kernel."""
    return subjects.load("dense_mla")


def folder(tmp_path: Path, name: str) -> Path:
    """One run's folder of the cases in flight."""
    path = tmp_path / name
    path.mkdir()
    return path


def test_what_one_run_finds_the_next_replays_once(tmp_path: Path, subject: subjects.Subject) -> None:
    """Another run fetches it; the same night does not fetch it again; what passes is dropped."""
    database, one, two = InMemoryExampleDatabase(), folder(tmp_path, "one"), folder(tmp_path, "two")
    sharing.Sharing(database, [subject], one).pytest_runtest_logreport(failed(record(0)))
    later = sharing.Sharing(database, [subject], two)
    assert sharing.snapshot(two) == [record(0)]
    for run in (one, two):
        sharing.Sharing(database, [subject], run)
        assert sharing.snapshot(run) == []
    later.pytest_runtest_logreport(passed(record(0)))
    assert list(database.fetch(sharing.key(subject))) == []


def test_another_subject_is_told_nothing(tmp_path: Path, subject: subjects.Subject) -> None:
    """A planted fault's failures say nothing about the kernel as it stands."""
    database, run = InMemoryExampleDatabase(), folder(tmp_path, "run")
    database.save(sharing.key(subject.planted("X1")), record(0).to_json().encode())
    sharing.Sharing(database, [subject], run)
    assert sharing.snapshot(run) == []


def test_what_cannot_be_read_is_left_alone(tmp_path: Path, subject: subjects.Subject) -> None:
    """Another schema's records stay for those who can read them."""
    database, run, key = InMemoryExampleDatabase(), folder(tmp_path, "run"), sharing.key(subject)
    for value in (b"\xff", b"{}", b'{"schema":99}', record(1).to_json().encode()):
        database.save(key, value)
    sharing.Sharing(database, [subject], run)
    assert sharing.snapshot(run) == [record(1)]
    assert len(list(database.fetch(key))) == 4


def test_github_is_read_only_beside_the_local_folder(tmp_path: Path) -> None:
    """What is found goes into the folder, never to GitHub."""
    database = sharing.open_database("github:owner/repository", tmp_path)
    assert isinstance(database, MultiplexedDatabase)
    assert "ReadOnlyDatabase(GitHubArtifactDatabase" in repr(database)


@pytest.mark.parametrize("name", ["github:owner", "github:a/b/c", "s3://bucket"])
def test_a_name_that_fits_no_form_is_refused(name: str, tmp_path: Path) -> None:
    """One line says what is wanted."""
    with pytest.raises(sharing.DatabaseError, match="wanted"):
        sharing.open_database(name, tmp_path)


def test_redis_absent_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package: what to install."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(sharing.DatabaseError, match=r"ragged-oracle\[redis\]"):
        sharing.open_database("redis://127.0.0.1:1", tmp_path)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of our own on a free loopback port."""
    pytest.importorskip("redis", reason="the optional group redis is not installed")
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server on this machine; .ci/run installs one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = tmp_path_factory.mktemp("redis")
    command = [server, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(here)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


def test_a_silent_redis_is_said_in_one_line(tmp_path: Path) -> None:
    """Nobody listens on port 1."""
    pytest.importorskip("redis", reason="the optional group redis is not installed")
    with pytest.raises(sharing.DatabaseError, match="127"):
        sharing.open_database("redis://127.0.0.1:1", tmp_path)


FAILING = """
def mla_ragged_paged_attention(*arrays, **options):
    raise RuntimeError("as planted")
"""


def test_two_shards_share_a_failure_through_redis(redis_url: str, tmp_path: Path) -> None:
    """The first run finds something; a second, on other cases, replays just that before anything else."""
    module = tmp_path / "failing.py"
    module.write_text(FAILING)
    found = _run(redis_url, module, tmp_path / "one", "-k", "equals_the_oracle", "--configs=1", "--seed=1")
    assert [event["event"] for event in found] == ["station", "finding"]
    replayed = _run(
        redis_url, module, tmp_path / "two", "-k", "equals_the_oracle or replayed_case", "--configs=1", "--seed=2"
    )
    first = next(event for event in replayed if event["event"] == "finding")
    assert first["case"] == found[1]["case"]
    assert replayed[0]["replayed"] == found[1]["case"]


def _run(url: str, module: Path, out: Path, *arguments: str) -> list[dict]:
    """The events of one small pytest run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={ROOT}",
        "-m",
        "differential",
    ]
    command += [f"--subject=dense_mla={module}", "--backend=interpret", f"--example-database={url}"]
    command += ["-p", "ci.journal", f"--journal={out}", *arguments]
    command += [str(ROOT / "properties" / name) for name in ("test_corpus.py", "test_dense_mla.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]
