"""Static menus: the few configs a run compiles, chosen so that every pair of option values meets in one of them."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Options = Mapping[str, Sequence[Any]]
Row = dict[str, Any]


def pairwise(options: Options, valid: Callable[[Row], bool], *, seed: int = 0, samples: int = 4000) -> list[Row]:
    """A small list of valid rows in which every pair of values that a valid sample row holds occurs (greedy cover).

    Seeds differ in how many rows they need; a menu names a good one. Deterministic: `random.Random` keeps its stream
    across Python versions.
    """
    chooser = random.Random(seed)
    drawn = [{name: chooser.choice(values) for name, values in options.items()} for _ in range(samples)]
    candidates = [row for row in drawn if valid(row)]
    pairs = _pairs(options, candidates)
    missing = np.zeros(pairs.max() + 1, bool)
    missing[pairs] = True
    rows = []
    while missing.any():
        best = int(np.argmax(missing[pairs].sum(axis=1)))
        rows.append(candidates[best])
        missing[pairs[best]] = False
    return rows


def _pairs(options: Options, rows: Sequence[Row]) -> np.ndarray:
    """int64 [rows, pairs of options]: a number for each pair of values that a row brings together.

    Every process of a run makes the menus, so this is arithmetic on arrays and not sets of tuples.
    """
    firsts = itertools.accumulate((len(values) for values in options.values()), initial=0)
    number = {(name, value): first + i for (name, values), first in zip(options.items(), firsts, strict=False)
              for i, value in enumerate(values)}  # fmt: skip
    values = np.array([[number[item] for item in row.items()] for row in rows])
    one, other = np.triu_indices(values.shape[1], k=1)
    return values[:, one] * len(number) + values[:, other]
