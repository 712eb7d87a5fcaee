"""Strategies that draw dense MLA cases, biased to the edges where such kernels break, and the menu of configs."""

import dataclasses
import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from properties.dense_mla.case import DenseCase, DenseConfig
from properties.drawing import any_row, around, codes, pick, values
from properties.menus import Row, pairwise
from properties.values import Values

OPTIONS: dict[str, Sequence] = {
    "q_dtype": ("bf16", "f32"),
    "kv_dtype": ("bf16", "f32", "e4m3", "e5m2"),
    "heads": (1, 3, 8, 16, 20),
    "kv_lora_rank": (32, 96, 128, 144),
    "rope": (8, 32, 64),
    "tokens": (1, 7, 12, 16),
    "sequences": (1, 3, 4, 6),
    "page_size": (8, 16, 32, 64),
    "pages_a_sequence": (3, 4, 5),
    "sm_scale": (0.11, 0.043),
    "sliding_window": (None, 1, 7, 8, 17, 40, 1000),
    "soft_cap": (None, 3.0, 30.0, 1e4),
    "mask_value": (None, -3.0),
    "scales": ((None, None, None), (0.5, 3.0, 0.25), (None, 4.0, None), (None, None, 3.0)),
    "chunk_prefill_size": (None, 1, 3, 4),
    "num_kv_pages_per_block": (1, 2, 3, 4),
    "num_queries_per_block": (1, 2, 3, 4, 8),
}
"""Full product of the static options; `scales` are (q_scale, k_scale, v_scale)."""

GATE_OPTIONS = OPTIONS | {
    "heads": (1, 8, 20),
    "kv_lora_rank": (32, 128, 144),
    "rope": (8, 64),
    "tokens": (7, 16),
    "sequences": (1, 4),
    "page_size": (8, 16, 32),
    "pages_a_sequence": (3, 5),
    "sliding_window": (None, 1, 7, 17),
    "soft_cap": (None, 3.0, 30.0),
    "scales": ((None, None, None), (0.5, 3.0, 0.25)),
    "chunk_prefill_size": (None, 1, 4),
    "num_kv_pages_per_block": (1, 2, 3),
    "num_queries_per_block": (1, 3, 8),
}
"""Fewer values an option, so that a menu in which all pairs meet stays small: each config costs seconds to compile."""


def valid(row: Row) -> bool:
    """Whether these options are worth a config together: a key is hidden by the default mask value in most."""
    return row["mask_value"] is None or row["soft_cap"] != 1e4


def build(row: Row) -> DenseConfig:
    """The config of one row of OPTIONS."""
    row = dict(row)
    q_scale, k_scale, v_scale = row.pop("scales")
    pool = row["sequences"] * row["pages_a_sequence"] + 2
    return DenseConfig(**row, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, pool=pool)


LONG = DenseConfig(
    q_dtype="bf16",
    kv_dtype="bf16",
    heads=1,
    kv_lora_rank=32,
    rope=8,
    tokens=4,
    sequences=2,
    page_size=256,
    pages_a_sequence=144,
    pool=12,
    sm_scale=0.11,
    sliding_window=None,
    soft_cap=None,
    mask_value=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    chunk_prefill_size=None,
    num_kv_pages_per_block=2,
    num_queries_per_block=2,
)
"""Positions past 16 bits, and blocks of keys four vectors wide; pages that are not written to are listed repeatedly."""

MENU: tuple[DenseConfig, ...] = tuple(build(row) for row in pairwise(GATE_OPTIONS, valid, seed=4))


def configs() -> st.SearchStrategy[DenseConfig]:
    """Any config of the full product of OPTIONS."""
    return any_row(OPTIONS, valid).map(build)


WIDE = dataclasses.replace(
    LONG,
    heads=64,
    tokens=192,
    page_size=32,
    pages_a_sequence=6,
    pool=14,
    num_kv_pages_per_block=2,
    num_queries_per_block=16,
)
"""Thousands of short rows (query and head), for what only many together show."""


@st.composite
def cases(draw: st.DrawFn, config: DenseConfig) -> DenseCase:
    """A case of `config`: everything that may vary without a new compile. Drawn as bytes, like the sparse cases."""
    slots, ranges = config.sequences, draw(codes(3))
    n = 0 if ranges[0] > 240 else 1 + ranges[0] % slots
    i, j = sorted(code % (n + 1) for code in ranges[1:])
    q_lens, (i, j, n) = _q_lens(config, (i, j, n), draw(codes(slots)))
    kv_lens = tuple(_kv_len(config, q, code) for q, code in zip(q_lens, draw(codes(slots)), strict=False))
    pages = _pages(config, q_lens, kv_lens, draw(codes(config.pool)), draw(codes(1))[0])
    return DenseCase(config, (i, j, n), q_lens, kv_lens, pages, draw(values()))


def _q_lens(
    config: DenseConfig, distribution: tuple[int, int, int], drawn: bytes
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Query lengths that fit T, and the distribution without the sequences for which no token slot is left."""
    i, j, n = distribution
    block, left, lengths = config.num_queries_per_block, config.tokens, []
    for sequence in range(n):
        most = left - (n - sequence - 1)  # one slot for each sequence that follows
        if sequence < i:
            q_len = 1
        elif sequence < j and config.chunk_prefill_size:
            q_len = config.chunk_prefill_size
        else:
            edges = around(1, block, 2 * block, most, low=1, high=max(most, 1))
            q_len = pick(edges, range(1, most + 1), drawn[sequence])
        if q_len > left:
            break
        lengths.append(q_len)
        left -= q_len
    n = len(lengths)
    return tuple(lengths), (min(i, n), min(j, n), n)


def _kv_len(config: DenseConfig, q_len: int, code: int) -> int:
    """A kv length of at least `q_len`: at an edge of page, block, window or capacity, with no history, or anywhere."""
    block = config.page_size * config.num_kv_pages_per_block
    window = config.sliding_window or 0
    lengths = (config.page_size, block, 2 * block, q_len + window, block + window, 2**15)
    edges = around(*lengths, low=q_len, high=config.capacity)
    return pick([q_len, *edges, config.capacity], range(q_len, config.capacity + 1), code)


def _pages(
    config: DenseConfig, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], order: bytes, shared: int
) -> tuple[int, ...]:
    """Physical pages in `order`; in a quarter of cases the full pages before every write are shared as a prefix.

    A page that is written to is listed once; where the pool is small, pages that are only read are listed repeatedly.
    """
    spans = [(kv_len - q_len, kv_len) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    read = [start // config.page_size for start, _ in spans]
    written = [-(-end // config.page_size) - full for full, (_, end) in zip(read, spans, strict=True)]
    free = sorted(range(config.pool), key=order.__getitem__)
    to_write, to_read = iter(free), itertools.cycle(free[sum(written) :])
    own = [[*itertools.islice(to_read, r), *itertools.islice(to_write, w)] for r, w in zip(read, written, strict=True)]
    for pages, full in zip(own, read, strict=True):
        prefix = own[0][: min(max(0, shared - 192), full, read[0])]
        pages[: len(prefix)] = prefix
    return tuple(itertools.chain.from_iterable(own))


def blank(config: DenseConfig) -> DenseCase:
    """The simplest case of `config`: an empty batch."""
    return DenseCase(config, (0, 0, 0), (), (), (), Values("normal", 0, "nan"))


def _serving(kv_dtype: str, heads: int, page_size: int, window: int | None, cap: float | None) -> DenseConfig:
    """A config of DeepSeek-V3's sizes: 256 sequences, 2048 query tokens, 128 pages each."""
    fp8 = kv_dtype.startswith("e")
    return DenseConfig(
        q_dtype="bf16",
        kv_dtype=kv_dtype,
        heads=heads,
        kv_lora_rank=512,
        rope=64,
        tokens=2048,
        sequences=256,
        page_size=page_size,
        pages_a_sequence=128,
        pool=524288 // page_size,
        sm_scale=192**-0.5,
        sliding_window=window,
        soft_cap=cap,
        mask_value=None,
        q_scale=None,
        k_scale=0.5 if fp8 else None,
        v_scale=0.25 if fp8 else None,
        chunk_prefill_size=None,
        num_kv_pages_per_block=max(1, 256 // page_size),
        num_queries_per_block=4 if heads == 128 else 16,
    )


SERVING_MENU: tuple[DenseConfig, ...] = (
    _serving("bf16", 128, 64, None, None),
    _serving("bf16", 16, 128, 4096, None),
    _serving("e4m3", 128, 256, None, 30.0),
    _serving("e5m2", 16, 128, 1024, 50.0),
)
