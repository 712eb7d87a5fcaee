"""Subjects: the module under test, ours or anyone's with the same calling convention."""

import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Self

ENTRIES: dict[str, tuple[str, ...]] = {
    "sparse_mla": (
        "sparse_mla_attention",
        "units_to_token_ids",
        "flat_to_paged_cache",
        "prefill_write_and_attend",
        "prefill_write_and_attend_ragged",
    ),
    "dense_mla": (
        "mla_ragged_paged_attention",
        "update_kv_cache",
        "ref_mla_ragged_paged_attention",
        "static_validate_inputs",
        "dynamic_validate_inputs",
        "prepare_q_inputs",
        "prepare_kv_inputs",
        "prepare_outputs",
    ),
}
"""What a subject of each kernel may provide, by the contract's names."""


class SubjectError(Exception):
    """A subject that can't be loaded; the message is one line for the user."""


class NotProvidedError(Exception):
    """The subject lacks a name of the contract: reported as such, never as passed."""


@dataclass(frozen=True)
class Subject:
    """A loaded module and the kernel it stands for."""

    kernel: str
    name: str
    """As the user gave it: a dotted name or a path."""
    module: ModuleType
    choose: str = ""
    """Arguments of `ci repro` that choose this subject; empty for the repository's own kernel as it stands."""

    @property
    def provided(self) -> tuple[str, ...]:
        """The contract's names that the module has."""
        return tuple(name for name in ENTRIES[self.kernel] if callable(getattr(self.module, name, None)))

    @property
    def missing(self) -> tuple[str, ...]:
        """The contract's names that the module lacks."""
        return tuple(name for name in ENTRIES[self.kernel] if name not in self.provided)

    def planted(self, mutant: str) -> Self:
        """This subject, known to hold a planted fault."""
        return replace(self, choose=f"{self.choose} --mutant {mutant}".strip())

    def function(self, name: str) -> Callable:
        """The entry point `name`.

        Raises:
            NotProvidedError: when the module has no such callable.
        """
        if name not in self.provided:
            raise NotProvidedError(f"{self.name} does not provide {name}")
        return getattr(self.module, name)


def takes_interpret(function: Callable) -> bool:
    """Whether the mode is passed as an argument; otherwise it is forced from outside."""
    return "interpret" in inspect.signature(function).parameters


def load(kernel: str, name: str | None = None) -> Subject:
    """Import the subject of `kernel`: a dotted module name, or a path to a .py file.

    Raises:
        SubjectError: unknown kernel, missing file, a module that fails to import or has none of the contract's names.
    """
    if kernel not in ENTRIES:
        raise SubjectError(f"unknown kernel {kernel!r}: wanted one of {', '.join(ENTRIES)}")
    choose = f"--subject {kernel}={shlex.quote(name)}" if name else ""
    name = name or f"kernels.{kernel}"
    try:
        module = _from_file(Path(name)) if name.endswith(".py") or "/" in name else importlib.import_module(name)
    except SubjectError:
        raise
    except BaseException as error:  # an import may raise anything, SystemExit too
        raise SubjectError(f"subject {name} fails to import: {type(error).__name__}: {error}") from error
    subject = Subject(kernel, name, module, choose)
    if not subject.provided:
        raise SubjectError(f"subject {name} provides none of {', '.join(ENTRIES[kernel])}")
    return subject


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SubjectError(f"subject {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"subject_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise SubjectError(f"subject {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
