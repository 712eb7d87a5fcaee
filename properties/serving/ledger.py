"""The model of who owns what: each request's history and pages, as plain lists; no page has a place yet."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from properties.serving.case import Step


class Sizes(Protocol):
    """What a config says of the pool."""

    page_size: int
    pool: int

    @property
    def capacity(self) -> int:
        """Tokens that a request may reach."""
        ...


@dataclass
class Request:
    """A live request."""

    history: list[int] = field(default_factory=list)
    """Its tokens, by number; an evicted request still knows them."""
    done: int = 0
    """How many of them stand in the pool."""
    pages: list[int] = field(default_factory=list)
    """Names of its pages, not their places; a forked request shares some."""


@dataclass(frozen=True)
class Span:
    """What one request brings to a batch: its tokens [first, last)."""

    request: int
    first: int
    last: int
    history: tuple[int, ...]
    """Its tokens up to `last`, by number."""
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Taken:
    """What follows from a step."""

    spans: tuple[Span, ...] = ()
    """The batch that it runs."""
    freed: tuple[int, ...] = ()
    """Pages that no request owns any more."""


class Ledger:
    """Requests and pages after the steps taken so far."""

    def __init__(self, config: Sizes) -> None:
        self._page_size, self._pool, self._capacity = config.page_size, config.pool, config.capacity
        self.requests: dict[int, Request] = {}
        self.admitted = 0
        """Requests ever admitted or forked."""
        self.known = 0
        """Tokens ever brought."""
        self._pages = 0

    @property
    def owned(self) -> set[int]:
        """Pages that some request owns."""
        return {page for request in self.requests.values() for page in request.pages}

    @property
    def free(self) -> int:
        """Pages left."""
        return self._pool - len(self.owned)

    def room(self, number: int, free: int) -> int:
        """Tokens that a request can grow by when it may take `free` pages."""
        request = self.requests[number]
        return min((len(request.pages) + free) * self._page_size, self._capacity) - request.done

    def needs(self, number: int, tokens: int) -> int:
        """Pages that a request takes to grow by so many tokens."""
        request = self.requests[number]
        return -(-(request.done + tokens) // self._page_size) - len(request.pages)

    def take(self, step: "Step") -> Taken:
        """Change hands as `step` says."""
        match step.action:
            case "admit":
                self._add(step.requests[0], Request())
            case "fork":
                parent = self.requests[step.requests[0]]
                full = parent.done // self._page_size
                done = full * self._page_size
                self._add(step.requests[1], Request(parent.history[:done], done, parent.pages[:full]))
            case "finish" | "evict":
                return self._release(step.requests[0], forget=step.action == "finish")
            case "attend":
                grown = zip(step.requests, step.lengths, strict=True)
                return Taken(tuple(self._span(r, self.requests[r].done - length) for r, length in grown))
            case _:
                grown = zip(step.requests, step.lengths, strict=True)
                return Taken(tuple(self._extend(r, length) for r, length in grown))
        return Taken()

    def _add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.admitted += 1

    def _extend(self, number: int, length: int) -> Span:
        request, first = self.requests[number], self.requests[number].done
        for _ in range(self.needs(number, length)):
            request.pages.append(self._pages)
            self._pages += 1
        request.done += length
        while len(request.history) < request.done:
            request.history.append(self.known)
            self.known += 1
        return self._span(number, first)

    def _span(self, number: int, first: int) -> Span:
        request = self.requests[number]
        return Span(number, first, request.done, tuple(request.history[: request.done]), tuple(request.pages))

    def _release(self, number: int, *, forget: bool) -> Taken:
        request = self.requests[number]
        pages, request.pages, request.done = request.pages, [], 0
        if forget:
            del self.requests[number]
        return Taken(freed=tuple(page for page in pages if page not in self.owned))
