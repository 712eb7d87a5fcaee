"""Correct attention kernels in NumPy: the oracles' bounds must hold for every one of them."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

FLOAT = np.float32
MASK_VALUE = FLOAT(-0.7 * np.finfo(FLOAT).max)


@dataclass(frozen=True)
class Kernel:
    """What an implementation may choose; all arithmetic is float32."""

    block: int
    """Keys a step of the online softmax."""
    order: int
    """Seed of the order in which keys come; 0 keeps theirs."""
    one_by_one: bool
    """Every sum grows a term at a time, the order that rounds worst; else as BLAS and NumPy do it."""
    base_two: bool
    """exp2 of scores times log2(e), folded into the scale."""
    scale_queries: bool
    """Scale the queries rather than the scores."""
    cast: Literal["none", "values", "all"]
    """Weights rounded to bfloat16: never, for the values alone, or for the normaliser as well."""
    coarse: float
    """Relative error added to every exp, of either sign."""
    output: type = np.float32

    def __call__(
        self,
        q: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        *,
        scale: float,
        soft_cap: float | None = None,
        value_scale: float = 1.0,
    ) -> np.ndarray:
        """Attend: q [H, D], keys [n, D] and values [n, L] of any float dtype give [H, L] of dtype `output`."""
        noise = np.random.default_rng(self.order)
        order = noise.permutation(len(keys)) if self.order else np.arange(len(keys))
        q, keys, values = (x.astype(FLOAT) for x in (q, keys[order], values[order]))
        maximum, total = np.full((len(q), 1), MASK_VALUE), np.zeros((len(q), 1), FLOAT)
        weighted = np.zeros((len(q), values.shape[1]), FLOAT)
        for start in range(0, len(keys), self.block):
            step = slice(start, start + self.block)
            scores = self._scores(q, keys[step], scale, soft_cap)
            risen = np.maximum(maximum, scores.max(axis=1, keepdims=True))
            decay, weights = self._exp(maximum - risen, noise), self._exp(scores - risen, noise)
            rounded = weights if self.cast == "none" else weights.astype(ml_dtypes.bfloat16).astype(FLOAT)
            summed = rounded if self.cast == "all" else weights
            total = total * decay + self._dot(summed, np.ones((summed.shape[1], 1), FLOAT))
            weighted = weighted * decay + self._dot(rounded, values[step])
            maximum = risen
        return (weighted * (FLOAT(value_scale) * (FLOAT(1) / total))).astype(self.output)

    def _scores(self, q: np.ndarray, keys: np.ndarray, scale: float, soft_cap: float | None) -> np.ndarray:
        unit = FLOAT(np.log2(np.e)) if self.base_two else FLOAT(1)
        if soft_cap is None:
            factor = FLOAT(scale) * unit
            return self._dot(q * factor, keys.T) if self.scale_queries else self._dot(q, keys.T) * factor
        cap = FLOAT(soft_cap)
        scores = self._dot(q * FLOAT(scale), keys.T) if self.scale_queries else self._dot(q, keys.T) * FLOAT(scale)
        return cap * np.tanh(scores / cap) * unit

    def _exp(self, x: np.ndarray, noise: np.random.Generator) -> np.ndarray:
        power = np.exp2(x) if self.base_two else np.exp(x)
        power = np.where(power < np.finfo(FLOAT).tiny, FLOAT(0), power)
        return power * (1 + self.coarse * noise.choice([-1, 1], x.shape) * (x != 0)).astype(FLOAT)

    def _dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if not self.one_by_one:
            return a @ b
        products = a[:, :, None] * b[None]
        return np.add.accumulate(products, axis=1, dtype=FLOAT)[:, -1]
