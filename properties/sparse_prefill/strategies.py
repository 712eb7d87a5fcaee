"""Strategies that draw sparse prefill cases, biased to the edges where such kernels break, and the menu of configs."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from properties.drawing import any_row, around, codes, pick, values
from properties.menus import Row, pairwise
from properties.sparse_mla.strategies import units_of_query
from properties.sparse_prefill.case import PrefillCase, PrefillConfig
from properties.values import Values

OPTIONS: dict[str, Sequence] = {
    "ragged": (True, False),
    "dtype": ("bf16", "f32"),
    "heads": (1, 3, 8, 16),
    "kv_lora_rank": (32, 96, 128, 144),
    "rope": (8, 32, 64),
    "tokens": (7, 12, 20, 33),
    "topk": (1, 3, 6),
    "read_block": (1, 2, 4, 8, 16),
    "page_size": (8, 16, 32),
    "sm_scale": (0.11, 0.043),
}
"""Full product of the static options."""

GATE_OPTIONS = OPTIONS | {
    "heads": (2, 8),
    "kv_lora_rank": (96, 128, 144),
    "rope": (8, 32),
    "tokens": (20,),
    "topk": (1, 6),
    "read_block": (1, 8),
    "page_size": (8, 16),
}
"""Fewer values an option, so that a menu in which all pairs meet stays small: each config costs a second to compile."""

SEQUENCES, PAGES_A_SEQUENCE = 3, 3
"""Of every ragged config that runs on a CPU."""


def valid(row: Row) -> bool:
    """Whether the contract allows these options together."""
    return row["page_size"] % row["read_block"] == 0


def build(row: Row) -> PrefillConfig:
    """The config of one valid row of OPTIONS."""
    if row["ragged"]:
        size = {"sequences": SEQUENCES, "pages_a_sequence": PAGES_A_SEQUENCE}
    else:
        size = {"sequences": 1, "pages_a_sequence": -(-row["tokens"] // row["page_size"])}
    return PrefillConfig(**row, **size, pool=size["sequences"] * size["pages_a_sequence"] + 2)


MENU: tuple[PrefillConfig, ...] = tuple(build(row) for row in pairwise(GATE_OPTIONS, valid, seed=4))


def configs() -> st.SearchStrategy[PrefillConfig]:
    """Any config of the full product of OPTIONS."""
    return any_row(OPTIONS, valid).map(build)


@st.composite
def cases(draw: st.DrawFn, config: PrefillConfig) -> PrefillCase:
    """A case of `config`: everything that may vary without a new compile. Drawn as bytes, like the sparse cases."""
    slots, tokens = config.sequences, config.tokens
    q_lens = _q_lens(config, draw(codes(slots)))
    kv_lens = q_lens
    if config.ragged:
        kv_lens = tuple(_kv_len(config, q, code) for q, code in zip(q_lens, draw(codes(slots)), strict=True))
    drawn, padding = draw(codes(tokens * config.topk)), draw(codes(tokens))
    places = [(kv, kv - q + t) for q, kv in zip(q_lens, kv_lens, strict=True) for t in range(q)]
    places += [(0, 0)] * (tokens - len(places))
    listed = (drawn[i : i + config.topk] for i in range(0, len(drawn), config.topk))
    described = zip(places, listed, padding, strict=True)
    units = tuple(units_of_query(config.read_block, *place, *codes) for place, *codes in described)
    pages = _pages(config, q_lens, kv_lens, draw(codes(config.pool)), draw(codes(1))[0])
    targets = draw(codes(tokens))
    outside = tuple(_outside(config)[code % len(_outside(config))] for code in targets)
    dropped = tuple(config.ragged and code >= 224 for code in targets)
    return PrefillCase(config, q_lens, kv_lens, units, pages, outside, dropped, draw(values()))


def _q_lens(config: PrefillConfig, drawn: bytes) -> tuple[int, ...]:
    """New tokens of each request, none among them, that fit T; in the single-sequence form at least one."""
    left, lengths = config.tokens, []
    for code in drawn:
        edges = around(0 if config.ragged else config.tokens, config.page_size, left, low=not config.ragged, high=left)
        lengths.append(pick(edges, range(left + 1) if config.ragged else range(1, left + 1), code) if left else 0)
        left -= lengths[-1]
    return tuple(lengths)


def _kv_len(config: PrefillConfig, q_len: int, code: int) -> int:
    """A length with `q_len` new tokens: with no cached prefix, at an edge of page or capacity, or anywhere."""
    ps, capacity = config.page_size, config.capacity
    edges = around(ps, 2 * ps, q_len + ps, capacity, low=q_len, high=capacity)
    return pick([q_len, *edges], range(q_len, capacity + 1), code)


def _pages(
    config: PrefillConfig, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], order: bytes, shared: int
) -> tuple[int, ...]:
    """Physical pages in `order`; in a quarter of cases the full pages before every write are shared as a prefix."""
    ps = config.page_size
    free = iter(sorted(range(config.pool), key=order.__getitem__))
    own = [[next(free) for _ in range(-(-kv_len // ps))] for kv_len in kv_lens]
    for pages, q_len, kv_len in zip(own, q_lens, kv_lens, strict=True):
        unwritten = min((kv_len - q_len) // ps, (kv_lens[0] - q_lens[0]) // ps)
        prefix = own[0][: min(max(0, shared - 192), unwritten)]
        pages[: len(prefix)] = prefix
    return tuple(itertools.chain.from_iterable(own))


def _outside(config: PrefillConfig) -> tuple[int, ...]:
    """Slots that no cache of `config` has."""
    return (-1, config.slots, -config.page_size, 2**31 - 1, -(2**31), config.slots + config.page_size)


def blank(config: PrefillConfig) -> PrefillCase:
    """The simplest case of `config`: nothing but padding."""
    none, tokens = (0,) * config.sequences, config.tokens
    units = ((-1,) * config.topk,) * tokens
    return PrefillCase(config, none, none, units, (), (-1,) * tokens, (False,) * tokens, Values("normal", 0, "finite"))


def _serving(ragged: bool, heads: int, read_block: int) -> PrefillConfig:
    """A config of DeepSeek-V3.2's sizes under tensor parallelism (16 heads) or without (128): 128 new tokens."""
    return PrefillConfig(
        ragged=ragged,
        dtype="bf16",
        heads=heads,
        kv_lora_rank=512,
        rope=64,
        tokens=128,
        topk=2048 // read_block,
        read_block=read_block,
        page_size=64,
        pages_a_sequence=128 if ragged else 2,
        pool=1024,
        sequences=4 if ragged else 1,
        sm_scale=192**-0.5,
    )


SERVING_MENU: tuple[PrefillConfig, ...] = (_serving(True, 16, 1), _serving(True, 128, 64), _serving(False, 16, 64))
