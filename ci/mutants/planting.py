"""Planting a known fault: one edit of one source file, made in memory while the module is imported.

The entries stand in the TOML files beside this module. Each names the kernel, the kind of fault, what it models, the
file, and the text to find there exactly once with its replacement.
"""

import importlib.abc
import importlib.util
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]


class MutantError(Exception):
    """An entry that doesn't exist, or an edit that no longer fits the source."""


@dataclass(frozen=True)
class Mutant:
    """One known fault."""

    id: str
    kernel: str
    kind: str
    """masks, padding, paging, copies, softmax, casts, output, ..."""
    models: str
    """The mistake it stands for."""
    file: str
    find: str
    replace: str
    look_first: str = "interpret"
    """The backend that is expected to see it: asked before the others."""
    look_at: str = ""
    """The property that is expected to see it: asked before the others, too; empty for the first of them."""
    equivalent: str = ""
    """Why no input can show it; empty for a real fault."""

    def source(self) -> str:
        """The file's text with the edit made.

        Raises:
            MutantError: the text to find doesn't stand there exactly once.
        """
        text = (ROOT / self.file).read_text()
        count = text.count(self.find)
        if count != 1:
            raise MutantError(f"mutant {self.id}: its text stands {count} times in {self.file}, wanted once: mend it")
        return text.replace(self.find, self.replace)

    @property
    def module(self) -> str:
        """Dotted name of the edited module."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def load() -> dict[str, Mutant]:
    """Every entry by id."""
    entries = [entry for path in sorted(Path(__file__).parent.glob("*.toml")) for entry in _read(path)]
    by_id = {mutant.id: mutant for mutant in entries}
    if len(by_id) != len(entries):
        raise MutantError("two mutants share an id")
    return by_id


def _read(path: Path) -> list[Mutant]:
    table = tomllib.loads(path.read_text())
    return [Mutant(kernel=table["kernel"], **{"file": table.get("file", ""), **entry}) for entry in table["mutant"]]


class _Loader(SourceFileLoader):
    """Compiles the edited text under the file's own name, past any bytecode cache."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(ROOT / mutant.file))
        self._text = mutant.source()

    def get_code(self, fullname: str) -> CodeType:
        """See importlib."""
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Hands the loader to the one module that is edited."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant, self._loader = mutant, _Loader(mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib."""
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def plant(mutant_id: str) -> None:
    """Make the edit of a mutant for the rest of this process.

    Raises:
        MutantError: no such mutant, an edit that no longer fits, or a module that is imported already.
    """
    mutants = load()
    if mutant_id not in mutants:
        raise MutantError(f"unknown mutant {mutant_id!r}: `python -m ci mutants --list` names them")
    mutant = mutants[mutant_id]
    if mutant.module in sys.modules:
        raise MutantError(f"mutant {mutant_id}: {mutant.module} is imported already")
    sys.meta_path.insert(0, _Finder(mutant))
