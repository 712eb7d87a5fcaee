"""Same seed, same case: whatever else is imported, on every Python that the pinned Hypothesis runs on."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import ExampleDatabase
from hypothesis.internal.conjecture import engine, providers
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

EXAMPLES_A_SEED = 8
"""`draw` returns the last of so many examples: the first ones of a run are always the simplest."""

SHRINK_SECONDS = 20
"""Hypothesis would shrink for up to five minutes; a red gate should say so sooner."""


def pin_hypothesis() -> None:
    """Make draws a function of the seed alone, and bound the time for shrinking.

    Hypothesis mixes in constants that it finds in the source of the modules loaded so far, so a subject's file, or an
    edit, would change what a seed draws.
    """
    empty = providers.Constants()
    providers._get_local_constants = lambda: empty
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS


def profile(examples: int, database: ExampleDatabase | None, *, shrink: bool = True) -> settings:
    """Every field of Hypothesis' settings said explicitly: under CI its own profile would derandomize and differ."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
    return settings(
        max_examples=examples,
        derandomize=False,
        database=database,
        verbosity=Verbosity.normal,
        phases=phases,
        stateful_step_count=12,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


def draw(strategy: SearchStrategy[T], key: Hashable) -> T:
    """The example of `strategy` that `key` stands for."""
    drawn: list[T] = []

    @profile(EXAMPLES_A_SEED, None, shrink=False)
    @seed(key)
    @given(strategy)
    def collect(example: T) -> None:
        drawn.append(example)

    pin_hypothesis()
    collect()
    return drawn[-1]


def configure(test: Callable, key: Hashable, examples: int, database: ExampleDatabase | None, shrink: bool) -> None:
    """Give one pytest item of a Hypothesis test its own seed and settings.

    The items of one parametrised test share a function, so decorators, which apply once, can't tell them apart.
    """
    test._hypothesis_internal_use_seed = key
    test._hypothesis_internal_use_settings = profile(examples, database, shrink=shrink)
