"""Softmax attention in float64, and how far from it a correct float32 kernel can be.

Exact: with scores s_k = scale * (q . key_k), soft-capped to c * tanh(s_k / c), and p = softmax(s) over the keys
present, out = sum_k p_k v_k (times `value_scale`). A key of weight two is a key listed twice.

What a kernel may do. It may compute the same formula in float32, with keys in any order and any blocks, shifted by
the largest score or by the largest so far (online softmax), with exp or exp2, dividing at the end or before. Each
float32 operation has a relative error of at most u = 2^-24 unless `Precision` states another: u_dot for the product
of two wide operands, e for exp and reciprocal, t for tanh, u_p for one cast of each weight before the value product,
u_out for the output. Every result below 2^-126 may be flushed to zero. It may fold the scale factors (each rounded to
float32) and log2(e) into either operand or into the product, as long as that happens in float32. Nothing else is
rounded: not the queries, not the keys, not the sums. Scores and sums must stay inside float32's range.

Notation: gamma(n) = n u / (1 - n u) bounds the relative error of n successive roundings (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., lemma 3.1); a sum of n terms, in any order or tree, puts at most n - 1 on
each term (section 4.2), so a product sum over D has error at most (gamma(D) + u_dot) sum_d |q_d||k_d| (section 3.1).
Zeros add exactly.

1. Score. |s'_k - s_k| <= eps_k = (gamma(D + 8) + u_dot) |scale| sum_d |q_d||key_kd|, 8 for the scale's factors, their
   products and log2(e), wherever they are applied: each is relative to every term. The cap's slope over [s - eps, s +
   eps] is at most sech^2 at the end nearest zero; division by and multiplication with c, both rounded, log2(e), and
   tanh add (t + 6 u) |capped|. A score that is not computed but set, `mask_value`, has 4 u |mask_value|.
2. Shift. exp(s'_k - m') with m' >= s'_k: the difference is rounded, then perhaps multiplied by a rounded log2(e): at
   most 3 u |s'_k - m'|, taken as 4 u. An online softmax reaches m' by m'_1 <= m'_2 <= ..., and the rounding errors of
   its differences add up to the same, because the differences do. In exact scores |s'_k - m'| <= max_j (s_j + eps_j)
   - s_k + eps_k.
3. Weight. So the kernel's weight of key k, up to a factor common to all, is p_k (1 + eta_k), |log(1 + eta_k)| <= h_k,
   the sum of eps_k, of step 2 and of (n + 1) e for its own exp and at most n exps of rescaling: a running maximum
   rises at most once a key. n counts keys that are not negligible: a key e^-105 or less of the largest weighs less
   than any float32, adding it to a sum errs by no more than itself, and a rescaling before the first key that counts
   concerns no key that does.
4. Output from perturbed weights, by algebra exactly: out' - out = sum_k p_k eta_k (v_k - out) / (1 + sum_k p_k
   eta_k). With w_k = p_k (e^h_k - 1) >= p_k |eta_k| and d = sum_k p_k e^-h_k <= 1 + sum_k p_k eta_k, Cauchy-Schwarz
   gives |out' - out| <= drift = sqrt(W sum_k w_k (v_k - out)^2) / d, W = sum_k w_k: products of matrices, and at most
   little more than sum_k w_k |v_k - out| / d. A row that one key wins has hardly any drift, because its v_k - out is
   nearly 0. The right side fails when h is large (huge scores in near tie). Then, since the new weights p' are a
   softmax as well and p'_k <= r_k = p_k e^h_k / d, drift is also at most sum_k p'_k |v_k - out|, that is the largest
   |v_k - out| of the keys with r_k > 2^-20 plus sum r_k |v_k - out| of the others, the *hull*; tried where W > 1.
5. Size. spread = sqrt(sum p (v - out)^2) + drift + W sqrt(sum p (v - out)^2) / d >= sum_k p'_k |v_k - out|, because
   |p'_k - p_k| <= p_k (|eta_k| + W) / d; likewise size = sum p |v| + the same last two terms >= sum_k p'_k |v_k|,
   because p' and p have the same sum and ||v_k| - |out|| <= |v_k - out|.
   (In hull rows spread <= hull and size <= |out| + hull.)
6. Cast weights. If the normaliser sums the weights before the cast, the error is at most u_p size; if it sums them
   after it, step 4 with |eta| <= u_p around out' gives u_p / (1 - u_p) sum p'_k |v_k - out'| <= u_p / (1 - u_p)
   (spread + drift).
7. Sums. Each term of the numerator passes n additions, at most n rescalings, a product; the normaliser likewise; then
   reciprocal, product and value scale: kappa size, kappa = gamma(4n + 16) + u_dot + 2 e, after step 6.
8. Flushed results: a weight loses at most 2^-126 of the largest, and so do each product and rescaled sum:
   2^-126 (sum_k |v_k| + n |out| + 2n + 2), with sum |v_k| <= sqrt(n sum v_k^2).
9. Output: everything times |value_scale|, plus u_out of the result, plus 2^-126 for a flushed output.

A query with no key is exactly 0 with a bound of 0. On data whose products and sums are all exact (small integers),
exp of differences that are not 0, its weights' sums, the reciprocal and the output are still rounded; the bound does
not know that the rest is exact, so such data show bit-equality between two kernels rather than against this.
"""

import numpy as np

from oracles.precision import SMALLEST_NORMAL, Precision

NEGLIGIBLE = 105.0
"""exp(-105) is less than half of the smallest float32, denormal ones included."""


def softmax_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    present: np.ndarray,
    *,
    scale: float,
    precision: Precision,
    soft_cap: float | None = None,
    visible: np.ndarray | None = None,
    mask_value: float = 0.0,
    value_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of every query to the keys present, and its error bound as derived above.

    Leading axes broadcast as those of matrix products do.

    Args:
      q: float64 [..., H, D].
      keys: float64 [..., n, D], finite; rows of keys not present should be zeros.
      values: float64 [..., n, L], finite.
      present: bool [..., n], keys that take part in the softmax, the same for all heads.
      scale: factor of the scores.
      precision: what a kernel may round.
      soft_cap: bound c of the scores, or None.
      visible: bool [..., n]; keys present but not visible have `mask_value` for a score. None: all are visible.
      mask_value: see `visible`; after scale and cap.
      value_scale: factor of the output.

    Returns:
      (expected, bound): float64 [..., H, L] each.
    """
    scores, error = _scores(q, keys, scale, soft_cap, precision)
    if visible is not None:
        hidden = ~visible[..., None, :]
        scores = np.where(hidden, mask_value, scores)
        error = np.where(hidden, 4 * precision.accumulation * abs(mask_value), error)
    weights, change, floor, count = _weights(scores, error, present[..., None, :], precision)
    squares = values * values
    moments = np.concatenate([weights, change], axis=-2) @ np.concatenate([values, squares], axis=-1)
    heads, width = weights.shape[-2], values.shape[-1]
    mean, mean_square = moments[..., :heads, :width], moments[..., :heads, width:]
    total_change = change.sum(axis=-1, keepdims=True)
    deviation = np.sqrt(_central(mean, mean, mean_square, 1.0, count))
    moved = _central(mean, moments[..., heads:, :width], moments[..., heads:, width:], total_change, count)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        drift = np.sqrt(total_change / floor**2 * moved)
        reweighted = drift + total_change / floor * deviation
    spread, size = deviation + reweighted, weights @ np.abs(values) + reweighted
    _bound_by_hull(drift, spread, size, mean, weights, change, floor, values)
    length = np.count_nonzero(present, axis=-1)[..., None, None]
    flushed = np.sqrt(length * squares.sum(axis=-2, keepdims=True)) + 2 * length + 2 + length * np.abs(mean)
    bound = drift + _sums(spread, size, drift, count, precision) + SMALLEST_NORMAL * flushed
    expected, bound = value_scale * mean, abs(value_scale) * bound
    bound += precision.output * (np.abs(expected) + bound) + SMALLEST_NORMAL
    return expected, np.where(length > 0, bound, 0.0)


def gamma(count: int | np.ndarray, roundoff: float) -> float | np.ndarray:
    """Bound on the relative error of `count` successive roundings (Higham, lemma 3.1)."""
    return count * roundoff / (1 - count * roundoff)


def _scores(
    q: np.ndarray, keys: np.ndarray, scale: float, soft_cap: float | None, precision: Precision
) -> tuple[np.ndarray, np.ndarray]:
    """Step 1: scores [..., H, n] and their error bounds."""
    transposed, roundoff, width = np.swapaxes(keys, -1, -2), precision.accumulation, q.shape[-1]
    scores = scale * (q @ transposed)
    error = (gamma(width + 8, roundoff) + precision.dot) * abs(scale) * (np.abs(q) @ np.abs(transposed))
    error += SMALLEST_NORMAL * (width * abs(scale) + 2)
    if soft_cap is None:
        return scores, error
    slope = 1 - np.tanh(np.maximum(np.abs(scores) - error, 0) / soft_cap) ** 2
    capped = soft_cap * np.tanh(scores / soft_cap)
    error *= slope
    return capped, error + (precision.tanh + 6 * roundoff) * (np.abs(capped) + error)


def _weights(
    scores: np.ndarray, error: np.ndarray, present: np.ndarray, precision: Precision
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps 2 and 3: p and w [..., H, n] of step 4, its d [..., H, 1], and the keys that count [..., H, 1].

    All are 0 in a row without a key, but for d, which is 1.
    """
    masked = np.where(present, scores, -np.inf)
    maximum, highest, lowest = (
        x.max(axis=-1, keepdims=True, initial=-np.inf) for x in (masked, masked + error, masked - error)
    )
    empty = np.isneginf(maximum)
    below = masked - np.where(empty, 0.0, maximum)
    count = np.count_nonzero(masked + error > lowest - NEGLIGIBLE, axis=-1, keepdims=True)
    distance = np.where(present, highest - scores + error, 0.0)
    doubt = error + 4 * precision.accumulation * distance - np.log1p(-precision.elementary) * (count + 1)
    weights = np.exp(below)
    total = weights.sum(axis=-1, keepdims=True) + empty
    weights /= total
    less = -np.expm1(-doubt)
    change = np.exp(np.minimum(below + doubt, 300.0)) * less / total
    floor = (weights * (1 - less)).sum(axis=-1, keepdims=True) + empty
    return weights, change, floor, count


def _central(
    centre: np.ndarray, first: np.ndarray, second: np.ndarray, weight: float | np.ndarray, count: np.ndarray
) -> np.ndarray:
    """sum_k w_k (v_k - centre)^2 from sum w v, sum w v^2 and sum w, not below its own float64 rounding error."""
    size = second + weight * centre * centre
    return np.maximum(size - 2 * centre * first, 0) + (count + 8) * 2.0**-52 * size


def _sums(
    spread: np.ndarray, size: np.ndarray, drift: np.ndarray, count: np.ndarray, precision: Precision
) -> np.ndarray:
    """Steps 6 and 7: what casting the weights and summing them adds to the drift."""
    cast = precision.probability
    kappa = gamma(4 * count + 16, precision.accumulation) + precision.dot + 2 * precision.elementary
    summed = kappa * (1 + cast) * size
    return summed + cast * np.maximum(size, (spread + drift) / (1 - cast)) if cast else summed


def _bound_by_hull(
    drift: np.ndarray,
    spread: np.ndarray,
    size: np.ndarray,
    mean: np.ndarray,
    weights: np.ndarray,
    change: np.ndarray,
    floor: np.ndarray,
    values: np.ndarray,
) -> None:
    """Lower drift, spread and size [..., H, L] to the hull of step 4 in the rows where its first form is poor."""
    poor = np.nonzero(change.sum(axis=-1) > 1)
    if not poor[0].size:
        return
    ceiling = (weights[poor] + change[poor]) / np.maximum(floor[poor], 1e-300)
    stacked = np.broadcast_to(values, (*weights.shape[:-2], *values.shape[-2:]))
    distance = np.abs(stacked[poor[:-1]] - mean[poor][:, None, :])
    likely = ceiling > 2.0**-20
    hull = np.max(np.where(likely[..., None], distance, 0.0), axis=-2)
    hull += (np.where(likely, 0.0, ceiling)[:, None, :] @ distance)[:, 0, :]
    drift[poor] = np.fmin(drift[poor], hull)
    spread[poor] = np.fmin(spread[poor], hull)
    size[poor] = np.fmin(size[poor], np.abs(mean[poor]) + hull)
