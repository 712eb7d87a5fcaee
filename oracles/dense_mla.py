"""Dense ragged paged MLA in float64: the new rows are written, then every query attends its sequence's earlier keys.

Row t of a sequence is position p = kv_len - q_len + t and sees key k when p - window < k <= p. The score is sm_scale
* q_scale * k_scale * (ql_nope . c_k + q_pe . r_k), then soft_cap * tanh(score / soft_cap), then mask_value for keys
below kv_len that are not seen; the output is v_scale * sum_k softmax_k c_k. The default mask value gives them no
weight.

Arguments are those of the kernel's contract without the ones that tune it, as anything NumPy can view; they are taken
to be valid, but a sequence without queries is skipped.
"""

from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from oracles.dense_batch import Batch, Sequence
from oracles.paging import Location, align, bits, decode, locate, packing, padded_row, slot_rows
from oracles.precision import Precision
from oracles.row import Row
from oracles.softmax import softmax_attention

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)
"""A score that leaves no weight; a mask value at or below it is taken to hide keys altogether."""


class Options(TypedDict, total=False):
    """What changes the numbers; see the module."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None


def mla_ragged_paged_attention(
    ql_nope: ArrayLike,
    q_pe: ArrayLike,
    new_kv_c: ArrayLike,
    new_k_pe: ArrayLike,
    cache_kv_c: ArrayLike,
    cache_k_pe: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    *,
    precision: Precision | None = None,
    **options: Unpack[Options],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Expected output, its error bound, and the caches.

    Args:
      ql_nope: [T, H, L].
      q_pe: [T, H, R].
      new_kv_c: [T, L].
      new_k_pe: [T, R].
      cache_kv_c: [N, page_size / packing, packing, align(L, 128)].
      cache_k_pe: [N, page_size / packing, packing, align(R, 128)].
      kv_lens: [S].
      page_indices: [S * W].
      cu_q_lens: [S + 1].
      distribution: [3].
      precision: what a kernel may round; None for what the dtypes allow.
      options: see `Options`.

    Returns:
      (expected, bound, cache_kv_c, cache_k_pe): float64 [T, H, L] twice, bound inf in rows that belong to no sequence;
      and the bits of the updated caches as unsigned integers.
    """
    ql_nope, kv_dtype = np.asarray(ql_nope), np.asarray(cache_kv_c).dtype
    metadata = (kv_lens, page_indices, cu_q_lens, distribution)
    caches = update_kv_cache(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, *metadata)
    batch = Batch.of(caches[0], *metadata)
    q = _queries(ql_nope, q_pe)
    precision = precision or Precision.of(ql_nope.dtype, kv_dtype, ql_nope.dtype)
    latent, rope = ql_nope.shape[-1], q.shape[-1] - ql_nope.shape[-1]
    expected, bound = np.zeros(ql_nope.shape), np.full(ql_nope.shape, np.inf)
    weighs_hidden = _weighs_hidden(options)
    for sequence in batch.sequences():
        tokens, visible = _candidates(sequence, options)
        keys = _keys(caches, sequence.slots(tokens), kv_dtype, latent, rope)
        expected[sequence.rows], bound[sequence.rows] = softmax_attention(
            q[sequence.rows],
            keys,
            keys[:, :latent],
            np.ones_like(visible) if weighs_hidden else visible,
            scale=_scale(options),
            precision=precision,
            soft_cap=options.get("soft_cap"),
            visible=visible if weighs_hidden else None,
            mask_value=_mask_value(options),
            value_scale=_factor(options, "v_scale"),
        )
    return expected, bound, *caches


def update_kv_cache(
    new_kv_c: ArrayLike,
    new_k_pe: ArrayLike,
    cache_kv_c: ArrayLike,
    cache_k_pe: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """The caches after the write of the new rows, each continued with zeros; as their bits, unsigned integers."""
    caches = []
    for new, cache in ((new_kv_c, cache_kv_c), (new_k_pe, cache_k_pe)):
        written, new = bits(cache).copy(), bits(new)
        rows = slot_rows(written)
        for sequence in Batch.of(written, kv_lens, page_indices, cu_q_lens, distribution).sequences():
            rows[sequence.slots(sequence.positions)] = padded_row(new[sequence.rows], rows.shape[1])
        caches.append(written)
    return tuple(caches)


def attended_tokens(
    t: int,
    cache_kv_c: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    **options: Unpack[Options],
) -> list[tuple[int, Location]]:
    """Keys that weigh in row t of the output: (number in the sequence, place)."""
    cache = np.asarray(cache_kv_c)
    batch = Batch.of(cache, kv_lens, page_indices, cu_q_lens, distribution)
    sequence = next(x for x in batch.sequences() if x.start <= t < x.start + x.q_len)
    position = sequence.kv_len - sequence.q_len + t - sequence.start
    return [
        (k, locate(int(sequence.slots(np.int64(k))), batch.page_size, packing(cache.dtype)))
        for k in range(sequence.kv_len)
        if _sees(position, k, options.get("sliding_window")) or _weighs_hidden(options)
    ]


def row(
    t: int,
    ql_nope: ArrayLike,
    q_pe: ArrayLike,
    new_kv_c: ArrayLike,
    new_k_pe: ArrayLike,
    cache_kv_c: ArrayLike,
    cache_k_pe: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    **options: Unpack[Options],
) -> Row:
    """Row t of the output, which belongs to a sequence, with every key up to the end of that sequence's last page."""
    metadata = (kv_lens, page_indices, cu_q_lens, distribution)
    caches = update_kv_cache(new_kv_c, new_k_pe, cache_kv_c, cache_k_pe, *metadata)
    dtype, latent, rope = np.asarray(cache_kv_c).dtype, np.shape(ql_nope)[-1], np.shape(q_pe)[-1]
    batch = Batch.of(caches[0], *metadata)
    sequence = next(x for x in batch.sequences() if x.start <= t < x.start + x.q_len)
    tokens = np.arange(align(sequence.kv_len, batch.page_size))
    slots = sequence.slots(tokens)
    keys, query = _keys(caches, slots, dtype, latent, rope), _queries(np.asarray(ql_nope)[t], np.asarray(q_pe)[t])
    with np.errstate(invalid="ignore"):
        scores = _scale(options) * (query @ keys.T)
    if (cap := options.get("soft_cap")) is not None:
        scores = cap * np.tanh(scores / cap)
    position, window = sequence.kv_len - sequence.q_len + t - sequence.start, options.get("sliding_window")
    seen = np.array([_sees(position, int(k), window) for k in tokens])
    counts = seen.astype(np.int64)
    if _weighs_hidden(options):
        hidden = ~seen & (tokens < sequence.kv_len)
        scores, counts = np.where(hidden, _mask_value(options), scores), counts | hidden
    places = [locate(int(slot), batch.page_size, packing(dtype)) for slot in slots]
    return Row(query, tokens, places, keys, _factor(options, "v_scale") * keys[:, :latent], scores, counts)


def mla_ragged_paged_attention_by_token(
    ql_nope: ArrayLike,
    q_pe: ArrayLike,
    new_kv_c: ArrayLike,
    new_k_pe: ArrayLike,
    cache_kv_c: ArrayLike,
    cache_k_pe: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    **options: Unpack[Options],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The expected output, float64 [T, H, L], and both caches in their own dtype, one token at a time.

    The plain meaning, slowly; rows that belong to no sequence are 0.
    """
    ql_nope, q_pe, new_kv_c, new_k_pe = (np.asarray(x) for x in (ql_nope, q_pe, new_kv_c, new_k_pe))
    caches, cu = (np.array(cache_kv_c), np.array(cache_k_pe)), [int(x) for x in np.asarray(cu_q_lens)]
    rows, packed = caches[0].shape[1:3]
    columns = len(page_indices) // len(kv_lens)
    latent, rope = new_kv_c.shape[1], new_k_pe.shape[1]
    out = np.zeros(ql_nope.shape)

    def place(s: int, k: int) -> Location:
        page, offset = divmod(k, rows * packed)
        return Location(int(page_indices[s * columns + page]), offset // packed, offset % packed)

    for s in range(int(distribution[2])):
        first = int(kv_lens[s]) - (cu[s + 1] - cu[s])
        for t in range(cu[s], cu[s + 1]):
            for cache, new in zip(caches, (new_kv_c, new_k_pe), strict=True):
                cache[place(s, first + t - cu[s])] = 0
                cache[place(s, first + t - cu[s])][: new.shape[1]] = new[t]
    for s in range(int(distribution[2])):
        first = int(kv_lens[s]) - (cu[s + 1] - cu[s])
        for t in range(cu[s], cu[s + 1]):
            for h in range(ql_nope.shape[1]):
                scores, values = [], []
                for k in range(int(kv_lens[s])):
                    c = caches[0][place(s, k)][:latent].astype(np.float64)
                    r = caches[1][place(s, k)][:rope].astype(np.float64)
                    score = ql_nope[t, h].astype(np.float64) @ c + q_pe[t, h].astype(np.float64) @ r
                    score *= _scale(options)
                    if options.get("soft_cap") is not None:
                        score = options["soft_cap"] * np.tanh(score / options["soft_cap"])
                    sees = _sees(first + t - cu[s], k, options.get("sliding_window"))
                    scores.append(score if sees else _mask_value(options))
                    values.append(c)
                weights = [np.exp(score - max(scores)) for score in scores]
                out[t, h] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return out * _factor(options, "v_scale"), *caches


def _sees(position: int, k: int, window: int | None) -> bool:
    return k <= position and (window is None or k > position - window)


def _factor(options: Options, name: str) -> float:
    value = options.get(name)
    return 1.0 if value is None else float(value)


def _scale(options: Options) -> float:
    return _factor(options, "sm_scale") * _factor(options, "q_scale") * _factor(options, "k_scale")


def _mask_value(options: Options) -> float:
    value = options.get("mask_value")
    return DEFAULT_MASK_VALUE if value is None else float(value)


def _weighs_hidden(options: Options) -> bool:
    """Whether keys that a query does not see have a weight."""
    return _mask_value(options) > DEFAULT_MASK_VALUE


def _queries(ql_nope: np.ndarray, q_pe: ArrayLike) -> np.ndarray:
    """float64 [..., L + R]."""
    return np.concatenate([decode(bits(x), x.dtype) for x in (ql_nope, np.asarray(q_pe))], axis=-1)


def _keys(
    caches: tuple[np.ndarray, np.ndarray], slots: np.ndarray, dtype: np.dtype, latent: int, rope: int
) -> np.ndarray:
    """float64 [n, L + R] keys in `slots` [n] of both caches, given by their bits."""
    rows = [slot_rows(cache)[slots, :width] for cache, width in zip(caches, (latent, rope), strict=True)]
    return decode(np.concatenate(rows, axis=1), dtype)


def _candidates(sequence: Sequence, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] keys that may have weight for some query, and bool [q_len, n] which of them each query sees."""
    window, positions = options.get("sliding_window"), sequence.positions[:, None]
    first = 0
    if window is not None and not _weighs_hidden(options):
        first = max(0, sequence.kv_len - sequence.q_len - window + 1)
    tokens = np.arange(first, sequence.kv_len)
    visible = tokens <= positions
    if window is not None:
        visible &= tokens > positions - window
    return tokens, visible
