"""The state machine that draws steps. Its rules plan only: what a step does to kernel, pool and model is checked when
the case is held, so a case found here is data like any other: it shrinks step by step, and is replayed without it.
"""

import functools
from collections import deque
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, precondition, rule

from properties.dense_mla.case import DenseConfig
from properties.determinism import profile
from properties.drawing import around, codes, pick, values
from properties.serving.case import ServingCase, SparseServingCase, Step
from properties.serving.ledger import Ledger
from properties.sparse_prefill.case import PrefillConfig
from properties.values import Values

AnyConfig = DenseConfig | PrefillConfig

WAITING = 1
"""Requests that may wait for their first chunk: more would only fill a run with admissions."""

PAGE_SIZE, PAGES_A_SEQUENCE, POOL = 4, 5, 13
"""Small pages, so that a dozen steps fill, share and reuse them; too few for all slots to be full at once."""

_CODE = st.integers(0, 255)


def _has_room(planner: "Planner") -> bool:
    return any(planner.rooms())


class Planner(RuleBasedStateMachine):
    """An engine's choices under the limits of its pool, slots and batch."""

    def __init__(self, config: AnyConfig) -> None:
        super().__init__()
        self.config, self.ledger, self.steps = config, Ledger(config), []

    def rooms(self) -> list[int]:
        """Of each live request, how many tokens it could grow by alone."""
        return [self.ledger.room(number, self.ledger.free) for number in self.ledger.requests]

    # Hypothesis takes rules for simpler by number of arguments, then by name, and shrinks to them: a chunk, which may
    # stand for several tokens, comes before a token and before another request.

    @precondition(lambda self: len(self.ledger.requests) < self.config.sequences and len(self._waiting()) < WAITING)
    @rule(_=st.none())
    def new_request(self, _: None) -> None:
        """A request arrives, with nothing in the pool."""
        self._take(Step("admit", (self.ledger.admitted,)))

    @precondition(_has_room)
    @rule(drawn=codes(3))
    def chunk(self, drawn: bytes) -> None:
        """One request grows by a chunk of any length."""
        which, length, page = drawn
        growing = [number for number, room in zip(self.ledger.requests, self.rooms(), strict=True) if room]
        number = growing[which % len(growing)]
        self._take(Step("prefill", (number,), (self._chunk(number, self.ledger.free, length),), page))

    @precondition(_has_room)
    @rule(page=_CODE)
    def decode(self, page: int) -> None:
        """Every request that can grows by a token."""
        self._grow(dict.fromkeys(self.ledger.requests, 1), page)

    @precondition(_has_room)
    @rule(lengths=codes(4), page=_CODE)
    def mix(self, lengths: bytes, page: int) -> None:
        """A mixed batch: some requests grow by a token, others by a chunk, and some wait."""
        free = self.ledger.free
        growing = [number for number, room in zip(self.ledger.requests, self.rooms(), strict=True) if room]
        coded = [(number, code) for number, code in zip(growing, lengths, strict=False) if code < 192] or [
            (growing[0], 0)
        ]
        self._grow({number: 1 if code % 2 else self._chunk(number, free, code) for number, code in coded}, page)

    @precondition(lambda self: len(self.ledger.requests) < self.config.sequences and self._long())
    @rule(which=_CODE)
    def fork(self, which: int) -> None:
        """A new request shares the full pages of another as its prefix."""
        parents = self._long()
        self._take(Step("fork", (parents[which % len(parents)], self.ledger.admitted)))

    @precondition(lambda self: self._started(1))
    @rule(which=_CODE)
    def finish(self, which: int) -> None:
        """A request leaves; pages that nobody shares are free again."""
        started = self._started(1)
        self._take(Step("finish", (started[which % len(started)],)))

    @precondition(lambda self: self._started(1))
    @rule(which=_CODE)
    def evict(self, which: int) -> None:
        """A request loses its pages, and has its history to prefill again."""
        started = self._started(1)
        self._take(Step("evict", (started[which % len(started)],)))

    @precondition(lambda self: isinstance(self.config, PrefillConfig) and self._started(1))
    @rule(drawn=codes(4), page=_CODE)
    def attend(self, drawn: bytes, page: int) -> None:
        """The last tokens of some requests attend a selection of what the pool holds; nothing is written."""
        batch, left = {}, self.config.tokens
        for number, code in zip(self._started(1), drawn, strict=False):
            if left:
                batch[number] = 1 + code % min(left, self.ledger.requests[number].done)
                left -= batch[number]
        self._take(Step("attend", tuple(batch), tuple(batch.values()), page))

    def _grow(self, wanted: dict[int, int], page: int) -> None:
        """Run a batch of what fits of the wanted lengths; single tokens come first."""
        batch, free, left = {}, self.ledger.free, self.config.tokens
        for number, length in sorted(wanted.items(), key=lambda item: item[1] > 1):
            grown = min(length, left, self.ledger.room(number, free))
            if grown > 0:
                batch[number] = grown
                free -= self.ledger.needs(number, grown)
                left -= grown
        if batch:
            ordered = sorted(batch.items(), key=lambda item: item[1] > 1)
            self._take(Step("decode", tuple(r for r, _ in ordered), tuple(length for _, length in ordered), page))

    def _take(self, step: Step) -> None:
        self.ledger.take(step)
        self.steps.append(step)

    def _started(self, least: int) -> list[int]:
        """Requests with at least so many tokens in the pool."""
        return [number for number, request in self.ledger.requests.items() if request.done >= least]

    def _waiting(self) -> list[int]:
        """Requests that have brought nothing yet."""
        return [number for number, request in self.ledger.requests.items() if not request.history]

    def _long(self) -> list[int]:
        """Requests with a full page."""
        return self._started(self.config.page_size)

    def _chunk(self, number: int, free: int, code: int) -> int:
        """A length that fits the batch and the pool: to the edge of a page, or any.

        The simplest is one past a full page: what shares, leaves or outgrows a page then needs one step, not five.
        """
        most = min(self.config.tokens, self.ledger.room(number, free))
        to_edge = -self.ledger.requests[number].done % self.config.page_size
        page_on = to_edge + self.config.page_size
        edges = around(1, to_edge, page_on, most, low=1, high=most)
        edges.sort(key=lambda length: abs(length - page_on - 1))
        return pick(edges, range(1, most + 1), code)


@st.composite
def cases(draw: st.DrawFn, config: AnyConfig) -> ServingCase:
    """A case of `config`: a run of the state machine, and the numbers."""
    run, planners = _machine(config)
    run(draw(st.data()))
    kind = SparseServingCase if isinstance(config, PrefillConfig) else ServingCase
    return kind(config, tuple(planners[-1].steps), draw(values()))


@functools.cache
def _machine(config: AnyConfig) -> tuple[Callable[[st.DataObject], None], deque[Planner]]:
    """What runs a planner on given data, and the planner of the last run."""
    planners: deque[Planner] = deque(maxlen=1)

    def begin() -> Planner:
        planners.append(Planner(config))
        return planners[-1]

    return get_state_machine_test(begin, settings=profile(1, None)).hypothesis.inner_test, planners


def _dense(q_dtype: str, kv_dtype: str, window: int | None) -> DenseConfig:
    narrow = kv_dtype.startswith("e")
    return DenseConfig(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        heads=2,
        kv_lora_rank=32,
        rope=8,
        tokens=12,
        sequences=4,
        page_size=PAGE_SIZE,
        pages_a_sequence=PAGES_A_SEQUENCE,
        pool=POOL,
        sm_scale=0.11,
        sliding_window=window,
        soft_cap=None,
        mask_value=None,
        q_scale=None,
        k_scale=0.5 if narrow else None,
        v_scale=0.25 if narrow else None,
        chunk_prefill_size=None,
        num_kv_pages_per_block=2,
        num_queries_per_block=4,
    )


def _sparse(dtype: str, kv_lora_rank: int) -> PrefillConfig:
    return PrefillConfig(
        ragged=True,
        dtype=dtype,
        heads=2,
        kv_lora_rank=kv_lora_rank,
        rope=8,
        tokens=12,
        topk=6,
        read_block=4,
        page_size=PAGE_SIZE,
        pages_a_sequence=PAGES_A_SEQUENCE,
        pool=POOL,
        sequences=4,
        sm_scale=0.11,
    )


MENU: tuple[DenseConfig, ...] = (_dense("f32", "f32", None), _dense("bf16", "bf16", 11), _dense("bf16", "e4m3", None))

SPARSE_MENU: tuple[PrefillConfig, ...] = (_sparse("f32", 32), _sparse("bf16", 96))


def configs() -> st.SearchStrategy[DenseConfig]:
    """A config of the menu: what varies here is the steps."""
    return st.sampled_from(MENU)


def sparse_configs() -> st.SearchStrategy[PrefillConfig]:
    """As `configs`, for the sparse kernel."""
    return st.sampled_from(SPARSE_MENU)


def blank(config: DenseConfig) -> ServingCase:
    """No step at all."""
    return ServingCase(config, (), _BLANK)


def sparse_blank(config: PrefillConfig) -> SparseServingCase:
    """No step at all."""
    return SparseServingCase(config, (), _BLANK)


_BLANK = Values("normal", 0, "finite")
