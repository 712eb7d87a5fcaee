"""What a correct kernel may round, and by how much."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

SMALLEST_NORMAL = 2.0**-126
"""Of float32 and of bfloat16; a kernel may flush anything smaller to zero, as TPUs do."""


@dataclass(frozen=True)
class Precision:
    """Largest relative error (unit roundoff) of each kind of step; 0 where the step must be exact."""

    dot: float
    """Of one product inside a matrix product. 0 when both operands are at most bfloat16: a float32 holds their product.
    2^-22 when one is float32: at HIGHEST precision a TPU splits each operand into three bfloat16 parts and leaves out
    the products of middle and low parts, below 2^-23 of the whole even where the parts are cut and not rounded. (That
    is for the six part products summed apart; it is not for DEFAULT precision, which rounds the operands to bfloat16.)
    """
    accumulation: float
    """Of one float32 addition or multiplication; 2^-24."""
    probability: float
    """Of casting a softmax weight to bfloat16 for the value product; 2^-8 when the cache is narrower than 32 bits, else
    0. Weights never go to an 8-bit float.
    """
    elementary: float
    """Of exp and of the reciprocal, for the argument given. 2^-21, eight roundoffs: XLA on a CPU was measured (4e6
    arguments) to reach 1.4 roundoffs for exp, 1.0 for 1/x. An error that grows with the argument, as that of
    exp(x) = 2^(x log2 e) in plain float32 does, is not in here but goes with the score. It excludes approximate
    reciprocals.
    """
    tanh: float
    """Of tanh. 2^-21: 4.8 roundoffs measured as above. The tanh unit of TPUs before v5 is coarser (absolute 2^-12): a
    run on one with a soft cap needs a larger value.
    """
    output: float
    """Of the final cast; 2^-8 to bfloat16, 0 to float32."""

    @classmethod
    def of(cls, q_dtype: DTypeLike, kv_dtype: DTypeLike, output_dtype: DTypeLike) -> Self:
        """What kernels may do with queries, cache and output of these dtypes."""
        q_wide, kv_wide, output_wide = (np.dtype(dtype).itemsize >= 4 for dtype in (q_dtype, kv_dtype, output_dtype))
        return cls(
            dot=2.0**-22 if q_wide or kv_wide else 0.0,
            accumulation=2.0**-24,
            probability=0.0 if kv_wide else 2.0**-8,
            elementary=2.0**-21,
            tanh=2.0**-21,
            output=0.0 if output_wide else 2.0**-8,
        )
