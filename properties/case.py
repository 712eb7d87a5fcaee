"""A case is data: frozen dataclasses of plain values, JSON both ways, and the arrays that follow from them.

Every kernel has its own `Config` (what is static: shapes, dtypes, options) and `Case` (a config plus what varies inside
it). This module holds what they share: `Inputs`, the digest of all input bytes, and the JSON codec.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

SCHEMA = 1
"""Version of the JSON of a case; it changes when an older file would mean something else."""


class CaseError(ValueError):
    """A case file that can't be read: not JSON, another schema, or fields that don't fit."""


@dataclass(frozen=True)
class Inputs:
    """One call of a kernel's entry point: `entry(*args, **kwargs, **options)`."""

    entry: str
    args: Mapping[str, np.ndarray]
    """Arrays passed by position, by their contract name."""
    kwargs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays passed by keyword."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Static Python values, passed by keyword; hashable."""
    donated: tuple[str, ...] = ()
    """Arguments whose buffers the caller gives away when compiled for a TPU."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, in calling order."""
        return {**self.args, **self.kwargs}

    def with_arrays(self, arrays: Mapping[str, np.ndarray]) -> Self:
        """This call with some arrays exchanged, by name."""
        args = {name: arrays.get(name, array) for name, array in self.args.items()}
        kwargs = {name: arrays.get(name, array) for name, array in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """This call with some options exchanged; the value None takes an option away."""
        merged = {**self.options, **options}
        return dataclasses.replace(self, options={name: v for name, v in merged.items() if v is not None})

    def without(self, name: str) -> Self:
        """This call without the array that is passed by keyword `name`."""
        return dataclasses.replace(self, kwargs={key: array for key, array in self.kwargs.items() if key != name})

    def digest(self) -> str:
        """SHA256 (hex) of the entry, the options and every input byte with its name, shape and dtype."""
        sha = hashlib.sha256(repr((self.entry, sorted(self.options.items(), key=lambda kv: kv[0]))).encode())
        for name, array in self.arrays.items():
            sha.update(f"{name}{array.shape}{array.dtype.name}".encode())
            sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()


class Config(Protocol):
    """The static part of a case: one compiled function a backend."""

    def __str__(self) -> str: ...

    def abstract(self) -> Inputs:
        """A call whose arrays have the right shapes and dtypes, and take no memory."""
        ...


def abstract_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of `shape` and `dtype` that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Case(Protocol):
    """One point in the space that the strategies search."""

    family: typing.ClassVar[str]
    """Name of this kind of case, which tells its class when read from JSON."""
    kernel: typing.ClassVar[str]
    config: Any

    def inputs(self) -> Inputs:
        """The arrays of this case: a pure function of its fields."""
        ...


def to_plain(value: Any) -> Any:
    """`value` as JSON's own types: dataclasses become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any, where: str = "case") -> Any:
    """The inverse of `to_plain` for a value of type `kind`.

    Raises:
        CaseError: naming the field, what was found and what is wanted.
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass_from_plain(kind, plain, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(plain, list):
            raise CaseError(f"{where}: found {plain!r}, wanted a list")
        return tuple(from_plain(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    if origin is types.UnionType:
        if plain is None and type(None) in arguments:
            return None
        kind = next(a for a in arguments if a is not type(None))
        return from_plain(kind, plain, where)
    accepted = (int, float) if kind is float else kind
    if not isinstance(plain, accepted) or (isinstance(plain, bool) and kind is not bool):
        raise CaseError(f"{where}: found {plain!r}, wanted {kind.__name__}")
    return kind(plain)


def _dataclass_from_plain(kind: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise CaseError(f"{where}: found {plain!r}, wanted an object with the fields of {kind.__name__}")
    wanted = typing.get_type_hints(kind)
    fields = [f.name for f in dataclasses.fields(kind)]
    if set(plain) != set(fields):
        missing, unknown = sorted(set(fields) - set(plain)), sorted(set(plain) - set(fields))
        raise CaseError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: from_plain(wanted[name], plain[name], f"{where}.{name}") for name in fields})


@dataclass(frozen=True)
class Record:
    """A case with what was asked of it: what a failure file holds and `repro` replays."""

    case: Case
    property: str | None = None
    """Name of the property that failed; None replays every property of the kernel."""
    backend: str | None = None

    def to_json(self) -> str:
        """One line of JSON without quotes that a shell would mind inside '...'."""
        head = {"schema": SCHEMA, "family": self.case.family, "property": self.property, "backend": self.backend}
        return json.dumps({**head, "case": to_plain(self.case)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, families: Mapping[str, type]) -> Self:
        """Read `to_json`'s text; `families` maps a family's name to its case class.

        Raises:
            CaseError: on text that is no JSON, a schema that isn't SCHEMA, an unknown family, or fields that don't fit.
        """
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise CaseError(f"not JSON ({error})") from None
        if not isinstance(plain, dict) or "schema" not in plain:
            raise CaseError("no case: wanted an object with a field 'schema'")
        if plain["schema"] != SCHEMA:
            age = "newer" if isinstance(plain["schema"], int) and plain["schema"] > SCHEMA else "older or foreign"
            raise CaseError(
                f"schema: found {plain['schema']!r} ({age}), wanted {SCHEMA}: use the version that wrote it"
            )
        family = plain.get("family")
        if family not in families:
            raise CaseError(f"family: found {family!r}, wanted one of {sorted(families)}")
        return cls(from_plain(families[family], plain.get("case")), plain.get("property"), plain.get("backend"))
