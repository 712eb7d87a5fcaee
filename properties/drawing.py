"""What the strategies of both kernels share: bytes that stand for structure, edges, and the strategy of values."""

import functools
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from properties.menus import Options, Row
from properties.values import POISONS, RECIPES, Values


@functools.cache
def values() -> st.SearchStrategy[Values]:
    """A recipe, its seed and a poison."""
    return st.builds(
        Values, mode=st.sampled_from(tuple(RECIPES)), seed=st.integers(0, 2**32 - 1), poison=st.sampled_from(POISONS)
    )


def any_row(options: Options, valid: Callable[[Row], bool]) -> st.SearchStrategy[Row]:
    """Any valid row of the full product of `options`."""
    return st.fixed_dictionaries({name: st.sampled_from(menu) for name, menu in options.items()}).filter(valid)


@functools.cache
def codes(count: int) -> st.SearchStrategy[bytes]:
    """`count` bytes for `pick` to decode."""
    return st.binary(min_size=count, max_size=count)


def around(*edges: int, low: int, high: int) -> list[int]:
    """Each edge and its two neighbours, inside [low, high], ascending."""
    return sorted({n for edge in edges for n in (edge - 1, edge, edge + 1) if low <= n <= high})


def pick(edges: Sequence[int], others: Sequence[int], code: int) -> int:
    """The value that a byte stands for: an edge for the lower 96 codes, the rest spread over `others`."""
    return edges[code % len(edges)] if code < 96 or not others else others[(code - 96) * len(others) // 160]
