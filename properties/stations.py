"""Stations: which property runs on which backend and config, and the decorators that make pytest tests of them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import aot, session
from properties.case import Case, CaseError, Config, Record
from properties.families import FAMILIES
from properties.trial import Trial

Check = Callable[[Case, Trial], None]


@dataclass(frozen=True)
class Plan:
    """How much of a property one backend runs."""

    stride: int = 1
    """Every `stride`-th config of the menu."""
    share: float = 1.0
    """Cases a config, as a share of --examples."""
    only: Config | None = None
    """Run this config alone, instead of a menu's."""


@dataclass(frozen=True)
class Property:
    """A statement that holds for every case of a family."""

    family: str
    name: str
    check: Check
    needs: tuple[str, ...]
    """Names of the contract that the subject must provide."""
    plans: Mapping[str, Plan]
    """By backend; a backend that is absent doesn't run it."""

    @property
    def kernel(self) -> str:
        """The kernel whose subject is asked."""
        return FAMILIES[self.family].case.kernel

    def stations(self, backend: str, configs: Sequence[Config] | None = None) -> Iterator["Station"]:
        """What `backend` runs of this property, on `configs` (default: its family's menus)."""
        if backend in self.plans:
            plan, family = self.plans[backend], FAMILIES[self.family]
            menu = family.serving_menu + family.menu if backend == aot.BACKEND else family.menu
            chosen = menu if configs is None else configs
            for config in [plan.only] if plan.only else chosen[:: plan.stride]:
                yield Station(self, backend, config, plan.share)


@dataclass(frozen=True)
class Station:
    """One pytest item: its compiled functions stay warm for all its cases."""

    property: Property
    backend: str
    config: Config
    share: float = 1.0
    case: Case | None = None
    """The one case to replay, instead of cases drawn."""

    def __str__(self) -> str:
        return f"{self.property.name + '-' if self.case else ''}{self.backend}-{self.config}"


def replays(record: Record, backends: Collection[str]) -> Iterator[Station]:
    """The stations that replay `record`: its property (or all of its family) on its backend (or each of `backends`).

    Raises:
        CaseError: the record names a property that its family doesn't have.
    """
    family = record.case.family
    known = {prop.name: prop for (owner, _), prop in PROPERTIES.items() if owner == family}
    if record.property and record.property not in known:
        raise CaseError(f"property: found {record.property!r}, wanted one of {sorted(known)}")
    for prop in [known[record.property]] if record.property else known.values():
        for backend in [record.backend] if record.backend else backends:
            if backend in prop.plans:
                yield Station(prop, backend, record.case.config, case=record.case)


PROPERTIES: dict[tuple[str, str], Property] = {}
"""Every property by (family, name); filled when the test modules are imported."""


def differential(family: str, *needs: str, **plans: Plan) -> Callable[[Check], Callable]:
    """Make a pytest test of `check(case, trial)` for each backend of `plans` (tpu_interpret=... is "tpu-interpret").

    A plan for interpret serves the tpu backend too.
    """
    by_backend = {name.replace("_", "-"): plan for name, plan in plans.items()}
    by_backend.setdefault("tpu", by_backend["interpret"])

    def decorate(check: Check) -> Callable:
        name = check.__name__.removeprefix("test_")
        prop = PROPERTIES[family, name] = Property(family, name, check, needs, by_backend)

        @given(data=st.data())
        def test(station: Station, data: st.DataObject) -> None:
            session.current().run(station, data)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.property = prop
        return pytest.mark.differential(test)

    return decorate


def compiles(family: str, *needs: str) -> Callable:
    """A pytest test that every config of the menus, serving sizes too, compiles for every TPU generation."""

    def check(case: Case, trial: Trial) -> None:
        for target in aot.TARGETS:
            trial.compile(target)

    prop = PROPERTIES[family, "compiles"] = Property(family, "compiles", check, needs, {aot.BACKEND: Plan()})

    def test_compiles(station: Station) -> None:
        """The TPU compiler takes the config, for each generation."""
        session.current().hold(prop, FAMILIES[family].blank(station.config), station.backend)

    test_compiles.property = prop
    return pytest.mark.differential(test_compiles)
