"""Strategies that draw sparse MLA cases, biased to the edges where such kernels break, and the menu of configs."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from properties.drawing import any_row, around, codes, pick, values
from properties.menus import Row, pairwise
from properties.sparse_mla.case import SparseCase, SparseConfig
from properties.values import Values

OPTIONS: dict[str, Sequence] = {
    "source": ("flat", "paged", "ragged"),
    "dtype": ("bf16", "f32"),
    "heads": (1, 3, 8, 16),
    "kv_lora_rank": (32, 96, 128, 144),
    "rope": (8, 32, 64),
    "batch": (1, 2, 3),
    "queries": (1, 3, 4),
    "topk": (1, 5, 8, 12, 17),
    "read_block": (1, 2, 3, 4, 6, 8, 16, 32),
    "block_units": (1, 2, 4, 8, 16),
    "page_size": (8, 16, 24, 32),
    "extra_tokens": (-1, 0, 1),
    "sm_scale": (0.11, 0.043),
}
"""Full product of the static options; `extra_tokens` sets the length off a multiple of page and unit."""

GATE_OPTIONS = OPTIONS | {
    "heads": (1, 3, 16),
    "kv_lora_rank": (32, 96, 128),
    "rope": (8, 32),
    "batch": (1, 2),
    "topk": (1, 5, 12),
    "read_block": (1, 3, 4, 16),
    "page_size": (8, 24, 32),
    "block_units": (1, 2, 8),
}
"""Fewer values an option, so that a menu in which all pairs meet stays small: each config costs a second to compile."""

BASE_TOKENS = 96
"""A multiple of every page size and unit of OPTIONS."""

LARGEST = 2**31 - 1


def valid(row: Row) -> bool:
    """Whether the contract allows these options together."""
    whole_units = row["source"] == "flat" or row["page_size"] % row["read_block"] == 0
    return whole_units and not (row["source"] == "ragged" and row["batch"] != 1)


def build(row: Row) -> SparseConfig:
    """The config of one valid row of OPTIONS."""
    row = dict(row)
    tokens = BASE_TOKENS + row.pop("extra_tokens")
    flat, ragged = row["source"] == "flat", row["source"] == "ragged"
    page_size = 0 if flat else row["page_size"]
    pages = 0 if flat else -(-tokens // page_size)
    requests = 3 if ragged else 0
    row["page_size"] = page_size
    return SparseConfig(
        **row, tokens=tokens, pool=(requests or row["batch"]) * pages + (not flat) * 2, requests=requests
    )


MANY_STEPS = SparseConfig(
    source="paged",
    dtype="f32",
    heads=3,
    kv_lora_rank=32,
    rope=8,
    batch=1,
    queries=3,
    topk=40,
    read_block=8,
    block_units=1,
    tokens=BASE_TOKENS + 1,
    page_size=8,
    pool=16,
    requests=0,
    sm_scale=0.11,
)
"""A long list in the smallest steps: state that is kept a step, say as a bit of a word, must last for all of them."""

_PAIRS = tuple(build(row) for row in pairwise(GATE_OPTIONS, valid, seed=1))

MENU: tuple[SparseConfig, ...] = (_PAIRS[0], MANY_STEPS, *_PAIRS[1:])
"""MANY_STEPS stands where strides pass over it, since it is slow where copies are simulated."""


def configs() -> st.SearchStrategy[SparseConfig]:
    """Any config of the full product of OPTIONS."""
    return any_row(OPTIONS, valid).map(build)


WIDE = SparseConfig(
    source="paged",
    dtype="bf16",
    heads=16,
    kv_lora_rank=32,
    rope=8,
    batch=1,
    queries=128,
    topk=8,
    read_block=4,
    block_units=4,
    tokens=BASE_TOKENS,
    page_size=16,
    pool=8,
    requests=0,
    sm_scale=0.11,
)
"""Thousands of short rows (query and head), for what only many together show."""


@st.composite
def cases(draw: st.DrawFn, config: SparseConfig) -> SparseCase:
    """A case of `config`: everything that may vary without a new compile.

    Structure is drawn as bytes, one draw for each field, and decoded: a draw an element costs more than the kernel.
    Zero bytes decode to the simplest structure (padding, pages in order), so shrinking works on the fields themselves.
    """
    rows, ragged = config.batch * config.queries, config.source == "ragged"
    seq_lens = tuple(_length(config, code) for code in draw(codes(config.requests)))
    q_seq_id = tuple(sorted(code % config.requests for code in draw(codes(rows)))) if ragged else ()
    lengths = [seq_lens[r] for r in q_seq_id] if ragged else [config.tokens] * rows
    positions = tuple(_position(config, *row) for row in zip(lengths, draw(codes(rows)), strict=True))
    drawn = draw(codes(rows * config.topk))
    listed = (drawn[i : i + config.topk] for i in range(0, len(drawn), config.topk))
    rb, described = config.read_block, zip(lengths, positions, listed, draw(codes(rows)), strict=True)
    units = tuple(units_of_query(rb, *row) for row in described)
    pages = _pages(config, seq_lens, draw(codes(config.pool)), draw(codes(1))[0])
    return SparseCase(config, units, positions, pages, q_seq_id, seq_lens, draw(values()))


def _length(config: SparseConfig, code: int) -> int:
    """A request's kv length: an edge of unit, page or capacity, empty among them, or anything."""
    edges = around(0, config.read_block, config.page_size, config.tokens, low=0, high=config.tokens)
    return pick(edges, range(config.tokens + 1), code)


def _position(config: SparseConfig, length: int, code: int) -> int:
    """A query's position: an edge of sequence, unit or page, at times past the end, or anywhere."""
    edges = around(length - 1, config.read_block, config.page_size, low=0, high=length)
    return pick([*(edges or [0]), LARGEST], range(length), code)


def units_of_query(read_block: int, length: int, position: int, drawn: bytes, padding: int) -> tuple[int, ...]:
    """K unit ids: padding, the causal edge, the last unit, ids past every length, and real units (duplicates too)."""
    count, edge = -(-length // read_block), position // read_block
    special = (-1, 0, edge, min(edge + 1, LARGEST), count - 1, count, LARGEST, LARGEST // read_block, -(2**31))
    units = [pick(special, range(count), code) for code in drawn]
    where, pads = padding % 4, padding // 4 % (len(drawn) + 1)
    if where == 1:  # padding leads
        units[:pads] = [-1] * pads
    elif where == 2:  # padding trails
        units[len(units) - pads :] = [-1] * pads
    elif where == 3 and count:  # no padding at all
        units = [unit if 0 <= unit < count else code % count for unit, code in zip(units, drawn, strict=True)]
    return tuple(units)


def _pages(config: SparseConfig, seq_lens: tuple[int, ...], order: bytes, shared: int) -> tuple[int, ...]:
    """Physical pages of every sequence, sorted by `order`; in a quarter of cases all share a prefix of the first."""
    if config.source == "flat":
        return ()
    lengths = seq_lens or (config.tokens,) * config.batch
    free = sorted(range(config.pool), key=order.__getitem__)
    ends = list(itertools.accumulate(-(-length // config.page_size) for length in lengths))
    own = [free[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    prefix = own[0][: max(0, shared - 192)]
    for pages in own:
        pages[: len(prefix)] = prefix[: len(pages)]
    return tuple(itertools.chain.from_iterable(own))


def blank(config: SparseConfig) -> SparseCase:
    """The simplest case of `config`: nothing but padding."""
    rows, ragged = config.batch * config.queries, config.source == "ragged"
    seq_lens = (0,) * config.requests
    pages = _pages(config, seq_lens, bytes(config.pool), 0)
    q_seq_id = (0,) * rows if ragged else ()
    units = ((-1,) * config.topk,) * rows
    return SparseCase(config, units, (0,) * rows, pages, q_seq_id, seq_lens, Values("normal", 0, "nan"))


def _serving(source: str, dtype: str, heads: int, read_block: int) -> SparseConfig:
    """A config of DeepSeek-V3.2's sizes under tensor parallelism (16 heads) or without (128)."""
    flat, ragged = source == "flat", source == "ragged"
    page_size, tokens = 0 if flat else max(64, read_block), 8192
    block_units = max(1, 1024 // read_block) if read_block > 1 else 32
    return SparseConfig(
        source=source,
        dtype=dtype,
        heads=heads,
        kv_lora_rank=512,
        rope=64,
        batch=1,
        queries=8,
        topk=2048 // read_block,
        read_block=read_block,
        block_units=block_units,
        tokens=tokens,
        page_size=page_size,
        pool=0 if flat else 4 * tokens // page_size,
        requests=4 if ragged else 0,
        sm_scale=192**-0.5,
    )


SERVING_MENU: tuple[SparseConfig, ...] = (
    *(_serving(s, d, h, 1) for s in ("flat", "paged", "ragged") for d in ("bf16", "f32") for h in (16, 128)),
    *(_serving(s, "bf16", h, 128) for s, h in (("flat", 16), ("paged", 128), ("ragged", 16))),
    _serving("paged", "bf16", 16, 64),
)
