"""What is particular to one kind of case: its menu, strategies, oracle, and its words for a failure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis.strategies import SearchStrategy

from properties.case import Case, Config, Inputs
from properties.compare import Verdict

Expected = tuple[np.ndarray, ...]
"""Per float output of the kernel its expected value and bound, then the bits of each cache."""


@dataclass(frozen=True)
class Family:
    """One kind of case."""

    case: type[Case]
    menu: tuple[Config, ...]
    """Configs a gate runs: every pair of option values meets in one."""
    serving_menu: tuple[Config, ...]
    """Configs of real serving sizes: compiled for TPUs, never run on a CPU."""
    configs: Callable[[], SearchStrategy[Config]]
    """Any config of the full product of options."""
    cases: Callable[[Config], SearchStrategy[Case]]
    blank: Callable[[Config], Case]
    """The simplest case of a config."""
    expect: Callable[[Inputs], Expected]
    explain: Callable[[Case, Inputs, np.ndarray, Verdict], str]
    """Where the worst element of a failed output lies, and which key would explain it."""
    simpler: Callable[[Any], Iterator[Case]] = lambda case: iter(())
    """Cases a little smaller than one that failed, where Hypothesis can't find them from what it drew."""
