"""Value recipes: queries and keys whose scores make a wrong mask, row or scale visible.

Both kernels attend with the concatenation [latent | rope] and return the latent part, so a score can be steered without
touching what is returned: every query holds the same constant in its first rope column, and the same column of a key
then adds a chosen *level*, in nats, to that key's score for every query and head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from properties import bits

LEVEL_LIMIT = 128.0
"""Largest magnitude of a key's level column: safely inside float8_e4m3fn (448)."""


@dataclass(frozen=True)
class Recipe:
    """How scores are spread: `sigma` nats of normal noise, plus levels in nats."""

    sigma: float
    needle: float = 0.0
    """Level of the slots just inside and just outside a boundary."""
    winner: float = 0.0
    """Level of one slot in eight."""
    offset: float = 0.0
    """Level of every slot."""
    named: bool = False
    """Latent columns spell the slot's number in +-1 instead of normal noise."""
    grid: bool = False
    """Latent columns are small integers: sums are exact, and only the levels tell keys apart."""
    positive: bool = False
    """Latent columns are positive: values don't cancel, so errors that lean to one side add up."""


RECIPES: dict[str, Recipe] = {
    "normal": Recipe(sigma=1.0),
    "sharp": Recipe(sigma=4.0),
    "needles": Recipe(sigma=0.5, needle=12.0),
    "names": Recipe(sigma=0.5, needle=6.0, winner=5.0, named=True),
    "ties": Recipe(sigma=2.0**-10),
    "winner": Recipe(sigma=1.0, winner=30.0),
    "huge": Recipe(sigma=300.0),
    "negative": Recipe(sigma=2.0, needle=8.0, offset=-2000.0),
    "abyss": Recipe(sigma=2.0, offset=-1e5),
    "grid": Recipe(sigma=0.0, needle=0.0, winner=-300.0, grid=True),
    "positive": Recipe(sigma=1.0, positive=True),
}

POISONS = ("finite", "nan", "mixed", "inf")
"""What unowned memory holds: plausible finite numbers, NaN with several payloads, both NaN and Inf, or Inf."""

_POISON_BITS: dict[str, dict[str, tuple[int, ...]]] = {
    "f32": {"nan": (0x7FC00000, 0xFFC00001, 0x7FA00000), "inf": (0x7F800000, 0xFF800000)},
    "bf16": {"nan": (0x7FC0, 0xFFC1, 0x7FA0), "inf": (0x7F80, 0xFF80)},
    "e5m2": {"nan": (0x7E, 0xFF, 0x7D), "inf": (0x7C, 0xFC)},
    "e4m3": {"nan": (0x7F, 0xFF), "inf": (0x7F, 0xFF)},  # e4m3fn has no infinity
}

_POISON_PERIOD = 4093
"""Unowned memory repeats itself after so many elements: a prime, so that no two rows or pages of it are alike."""

# Streams of the counter-based generator, one for each independent array.
_QUERY, _KEY, _LEVEL, _POISON = range(4)


@dataclass(frozen=True)
class Values:
    """All numbers of a case: a recipe by name, its seed, and what unowned memory holds."""

    mode: str
    seed: int
    poison: str

    def queries(self, shape: tuple[int, int], latent: int, rope: int, scale: float) -> np.ndarray:
        """float64 [rows, H, latent + rope] for scores multiplied by `scale`."""
        recipe = RECIPES[self.mode]
        width = latent + rope
        spread = recipe.sigma / (abs(scale) * math.sqrt(width))
        q = bits.normals(self.seed, _QUERY, (*shape, width)) * spread
        q[..., latent] = _gain(recipe, scale) * math.copysign(1.0, scale)
        return q

    def keys(
        self, slots: int, latent: int, rope: int, scale: float, needles: Sequence[int], stream: int = 0
    ) -> np.ndarray:
        """float64 [slots, latent + rope]; `needles` are slots next to a boundary, `stream` tells pools apart."""
        recipe = RECIPES[self.mode]
        stream *= 4
        k = bits.normals(self.seed, stream + _KEY, (slots, latent + rope))
        number = np.arange(slots)[:, None]
        if recipe.named:
            k[:, :latent] = np.where(number >> (np.arange(latent) % max(1, slots.bit_length())) & 1, 1.0, -1.0)
        if recipe.grid:
            k[:, :latent] = np.round(2.0 * k[:, :latent])
        if recipe.positive:
            k[:, :latent] = np.abs(k[:, :latent])
        level = np.full(slots, recipe.offset)
        level += recipe.winner * (bits.choices(self.seed, stream + _LEVEL, (slots,), 8) == 0)
        level[np.asarray(needles, np.int64)] += recipe.needle
        k[:, latent] = level / (abs(scale) * _gain(recipe, scale))
        return k

    def unowned(self, shape: tuple[int, ...], dtype: str, stream: int = 0) -> np.ndarray:
        """`dtype` array `shape` for memory that no token owns."""
        size = min(_POISON_PERIOD, math.prod(shape))
        if self.poison == "finite":
            poison = (bits.normals(self.seed, 4 * stream + _POISON, (size,)) * 4.0).astype(bits.DTYPES[dtype])
            return np.resize(poison, shape)
        by_kind = _POISON_BITS[dtype]
        patterns = by_kind["nan"] + by_kind["inf"] if self.poison == "mixed" else by_kind[self.poison]
        picked = bits.choices(self.seed, 4 * stream + _POISON, (size,), len(patterns))
        return np.resize(np.array(patterns, f"u{bits.DTYPES[dtype].itemsize}")[picked], shape).view(bits.DTYPES[dtype])


def _gain(recipe: Recipe, scale: float) -> float:
    """The power of two in the query's level column that keeps every key's level column within LEVEL_LIMIT."""
    largest = abs(recipe.offset) + abs(recipe.needle) + abs(recipe.winner)
    _, exponent = math.frexp(largest / (abs(scale) * LEVEL_LIMIT))
    return 2.0 ** max(0, exponent)
