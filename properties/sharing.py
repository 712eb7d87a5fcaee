"""Failures shared between runs and machines, through Hypothesis' ExampleDatabase: replayed first, dropped once right.

Only the controlling process talks to the database. Its workers, which must all collect the same items, read what it
fetched from the folder of the cases in flight.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from properties.case import SCHEMA, CaseError, Record
from properties.families import CASES
from properties.reports import FINDING, RESULT
from properties.subjects import Subject

FOLDER = Path(".hypothesis", "failures")
"""Below the root directory: where failures are kept unless another database is named."""

MOST_REPLAYED = 20
"""Records replayed a run, the shortest first: each costs a compile."""


class DatabaseError(Exception):
    """A database that can't be used; the message is one line for the user."""


def open_database(name: str | None, root: Path) -> ExampleDatabase:
    """The database that `name` stands for: a folder, redis://HOST:PORT/DB or github:OWNER/REPO; None is FOLDER.

    GitHub's is a folder's artifact that a workflow uploaded: read only, beside the local folder.

    Raises:
        DatabaseError: the package redis is not installed, the server doesn't answer, or the name fits no form.
    """
    if name is None:
        return DirectoryBasedExampleDatabase(root / FOLDER)
    if name.startswith(("redis://", "rediss://", "unix://")):
        return _redis(name)
    if name.startswith("github:"):
        owner, _, repository = name.removeprefix("github:").partition("/")
        if not owner or not repository or "/" in repository:
            raise DatabaseError(f"--example-database: found {name!r}, wanted github:OWNER/REPO")
        artifact = ReadOnlyDatabase(GitHubArtifactDatabase(owner, repository))
        return MultiplexedDatabase(DirectoryBasedExampleDatabase(root / FOLDER), artifact)
    if "://" in name:
        raise DatabaseError(f"--example-database: found {name!r}, wanted a folder, redis://... or github:OWNER/REPO")
    return DirectoryBasedExampleDatabase(name)


def _redis(url: str) -> ExampleDatabase:
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
    except ImportError:
        raise DatabaseError("--example-database redis://...: needs `pip install 'ragged-oracle[redis]'`") from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=10)
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise DatabaseError(f"--example-database {url}: {error}") from None
    return RedisExampleDatabase(client)


def key(subject: Subject) -> bytes:
    """The database's key for one subject's failures: another subject's say nothing about it."""
    return f"ragged-oracle {SCHEMA} {subject.kernel} {subject.choose}".encode()


def snapshot(folder: Path) -> list[Record]:
    """What the controlling process fetched; none when this run uses no database."""
    path = folder / "shared.jsonl"
    return [Record.from_json(line, CASES) for line in path.read_text().splitlines()] if path.exists() else []


def of(config: pytest.Config, subjects: Iterable[Subject], folder: Path) -> "Sharing | None":
    """The hooks that this run needs: none for a single replay or a planted fault, unless a database is named.

    Raises:
        pytest.UsageError: the database can't be used.
    """
    options = config.option
    if options.example_database is None and (options.replay or options.mutant):
        return None
    try:
        database = open_database(options.example_database, config.rootpath)
        return Sharing(database, subjects, folder)
    except DatabaseError as error:
        raise pytest.UsageError(str(error)) from None


class Sharing:
    """pytest hooks of the controlling process."""

    def __init__(self, database: ExampleDatabase, subjects: Iterable[Subject], folder: Path) -> None:
        """Fetch what to replay into `folder`, but nothing twice: successive runs of one night share the folder.

        Raises:
            DatabaseError: the database can't be read.
        """
        self.database = database
        self.keys = {subject.kernel: key(subject) for subject in subjects}
        self._met_file = folder / "met.jsonl"
        self._met = set(self._met_file.read_text().splitlines()) if self._met_file.exists() else set()
        try:
            fetched = {line for name in self.keys.values() for line in map(_text, database.fetch(name)) if line}
        except Exception as error:  # each kind of database raises its own
            raise DatabaseError(f"--example-database: {type(error).__name__}: {error}") from None
        readable = filter(_readable, fetched - self._met)
        chosen = sorted(readable, key=lambda line: (len(line), line))[:MOST_REPLAYED]
        (folder / "shared.jsonl").write_text("".join(f"{line}\n" for line in chosen))
        self._meet(*chosen)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Save what fails; delete what passes now."""
        properties = dict(report.user_properties)
        finding, result = properties.get(FINDING), properties.get(RESULT)
        try:
            if finding:
                self._meet(finding["case"])
                self.database.save(self.keys[finding["kernel"]], finding["case"].encode())
            elif result and result["replayed"] and report.passed and result["cases"] > result["unsupported"]:
                self.database.delete(self.keys[result["kernel"]], result["replayed"].encode())
        except Exception as error:  # the run is worth more than the sharing
            print(f"\nexample database: {type(error).__name__}: {error}", flush=True)

    def _meet(self, *lines: str) -> None:
        new = [line for line in lines if line not in self._met]
        self._met.update(new)
        with self._met_file.open("a") as file:
            file.writelines(f"{line}\n" for line in new)


def _text(value: bytes) -> str:
    """The line that was saved; empty if it is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return ""
    return "" if "\n" in text else text


def _readable(line: str) -> bool:
    """Whether this version can replay the record: another's stays in the database for those who can."""
    try:
        record = Record.from_json(line, CASES)
    except CaseError:
        return False
    return record.property is not None and record.backend is not None
