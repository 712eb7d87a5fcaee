"""The same seed draws the same case, to the last input byte, on every Python and whatever else is imported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from properties.determinism import draw
from properties.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
SEEDS = range(6)
NEEDED = ("numpy", "ml_dtypes", "hypothesis", "sortedcontainers", "pytest")
"""All that drawing a case needs: another Python installs these alone."""

SCRIPT = "from properties.test_determinism import digests; print(*digests(), sep='\\n')"


def digests() -> list[str]:
    """family:seed digest, a line for each."""
    found = []
    for name, family in FAMILIES.items():
        for seed in SEEDS:
            case = draw(family.configs().flatmap(family.cases), seed)
            found.append(f"{name}:{seed} {case.inputs().digest()}")
    return found


def other_pythons() -> list[str]:
    """Interpreters of other minor versions that this machine has, 3.11 or newer."""
    minors = [minor for minor in range(11, 16) if minor != sys.version_info.minor]
    found = {minor: shutil.which(f"python3.{minor}") for minor in minors}
    for path in sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin/python")):
        minor = int(path.parts[-3].split(".")[1])
        if minor in found:
            found[minor] = str(path)
    return [path for path in found.values() if path]


def run(python: str, **environment: str) -> list[str]:
    """`digests` in another process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([python, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def test_another_process_draws_the_same_cases() -> None:
    """Neither the hash seed nor the modules loaded so far count."""
    assert run(sys.executable, PYTHONHASHSEED="7") == digests()


def test_another_subject_does_not_change_what_a_seed_draws(tmp_path: Path) -> None:
    """Hypothesis mixes in constants of loaded source files; a subject's must not count."""
    (tmp_path / "subject_with_constants.py").write_text("A, B = 13, 57\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import subject_with_constants\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == digests()


@pytest.mark.parametrize("python", other_pythons())
def test_another_python_draws_the_same_cases(python: str) -> None:
    """Each other Python here, with the pinned packages of its version, draws the same bytes."""
    minor = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split(".")[1]
    venv = ROOT / ".venv-other" / f"3.{minor}"
    if not (venv / "installed").exists():
        pins = (ROOT / "ci" / "requirements.txt").read_text().splitlines()
        wanted = [pin for pin in pins if pin.split("==")[0] in NEEDED]
        (venv / "pins.txt").parent.mkdir(parents=True, exist_ok=True)
        (venv / "pins.txt").write_text("\n".join(wanted) + "\n")
        subprocess.run([python, "-m", "venv", str(venv)], capture_output=True, check=True)
        install = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(venv / "pins.txt")]
        if subprocess.run(install, capture_output=True, check=False).returncode:
            pytest.skip(f"no package index from which to equip {python}")
        (venv / "installed").touch()
    assert run(str(venv / "bin" / "python")) == digests()
