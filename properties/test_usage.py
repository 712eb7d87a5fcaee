"""Wrong usage of the verbs: one clear line that names what was wrong, exit code 2, and never a traceback."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

OLDER = '{"schema":0,"family":"sparse_mla","case":{}}'
NEWER = '{"schema":99,"family":"sparse_mla","case":{}}'

WRONG: dict[str, tuple[list[str], str]] = {
    "unknown verb": (["gaet"], "unknown verb 'gaet'"),
    "unknown kernel": (["gate", "--kernel", "flash"], "unknown kernel 'flash'"),
    "unknown backend": (["gate", "--backend", "gpu"], "unknown backend 'gpu'"),
    "no TPU": (["gate", "--backend", "tpu"], "no TPU"),
    "missing subject": (["gate", "--subject", "sparse_mla=/nowhere/kernel.py"], "no such file"),
    "subject without a module": (["gate", "--subject", "sparse_mla"], "wanted KERNEL=MODULE"),
    "subject that fails to import": (["gate", "--subject", "sparse_mla={folder}/broken.py"], "fails to import"),
    "subject with nothing in it": (["gate", "--subject", "sparse_mla={folder}/empty.py"], "provides none of"),
    "examples below 1": (["gate", "--examples", "0"], "wanted at least 1"),
    "unknown mutant": (["mutants", "X99"], "unknown mutant 'X99'"),
    "missing case": (["repro", "/nowhere/case.json"], "no such file"),
    "corrupt case": (["repro", "{folder}/corrupt.json"], "not JSON"),
    "older case": (["repro", OLDER], "older"),
    "newer case": (["repro", NEWER], "newer"),
    "case with a field missing": (["repro", '{"schema":1,"family":"sparse_mla","case":{}}'], "missing fields"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess]:
    """Every wrong call's outcome; they run side by side, since most of their time is imports."""
    folder = tmp_path_factory.mktemp("subjects")
    (folder / "broken.py").write_text("import a_module_that_does_not_exist\n")
    (folder / "empty.py").write_text("")
    (folder / "corrupt.json").write_text('{"schema": 1, "fam')
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call(arguments: list[str]) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "ci", *(a.replace("{folder}", str(folder)) for a in arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        done = pool.map(call, [arguments for arguments, _ in WRONG.values()])
        return dict(zip(WRONG, done, strict=True))


@pytest.mark.xdist_group("usage")
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_usage_says_so(mistake: str, results: dict[str, subprocess.CompletedProcess]) -> None:
    """Exit code 2, the cause in the output, and no traceback."""
    done, wanted = results[mistake], WRONG[mistake][1]
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert wanted in output
    assert "Traceback" not in output


def test_a_missing_tpu_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libtpu the compile backend is refused with what to install."""
    from properties import aot
    from properties.backends import BackendError

    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(BackendError, match=r"libtpu is not installed .*ragged-oracle\[compile\]"):
        aot.require_libtpu()
