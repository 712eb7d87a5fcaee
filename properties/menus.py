"""Static menus: the few configs a run compiles, chosen so that every pair of option values meets in one of them."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Options = Mapping[str, Sequence[Any]]
Row = dict[str, Any]


def pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every unordered pair of (option, value) that `row` brings together."""
    return set(itertools.combinations(row.items(), 2))


def reachable_pairs(options: Options, valid: Callable[[Row], bool], samples: Iterable[Row]) -> set:
    """The pairs that some valid row among `samples` holds."""
    return set().union(*(pairs(row) for row in samples if valid(row)))


def pairwise(options: Options, valid: Callable[[Row], bool], *, seed: int = 0, samples: int = 4000) -> list[Row]:
    """A small list of valid rows in which every pair of values that a valid sample row holds occurs (greedy cover).

    Deterministic: `random.Random` keeps its stream across Python versions.
    """
    chooser = random.Random(seed)
    drawn = [{name: chooser.choice(values) for name, values in options.items()} for _ in range(samples)]
    candidates = [row for row in drawn if valid(row)]
    missing = reachable_pairs(options, valid, candidates)
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows
