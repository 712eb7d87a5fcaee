"""Shorter sequences of steps. Hypothesis deletes what it drew, after which the draws that follow mean other steps; here
a step is taken out of a case, and the others stay what they are.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from properties.serving.case import ServingCase, Step
from properties.serving.ledger import Ledger

GROWTH = ("prefill", "decode")


def simpler(case: ServingCase) -> Iterator[ServingCase]:
    """Cases of one step less: left out, or its tokens brought by the next batch of the same request."""
    for number in reversed(range(len(case.steps))):
        for steps in (_without(case.steps, number), _merged(case.steps, number)):
            if steps and _possible(case, steps):
                yield dataclasses.replace(case, steps=steps)


def _without(steps: Sequence[Step], number: int) -> tuple[Step, ...]:
    """The steps but one. If a request came with it, the others go without it, and requests behind it move up."""
    left_out = steps[number]
    others = (*steps[:number], *steps[number + 1 :])
    if left_out.action not in ("admit", "fork"):
        return others
    gone = left_out.requests[-1]
    return tuple(step for step in (_without_request(step, gone) for step in others) if step.requests)


def _without_request(step: Step, gone: int) -> Step:
    kept = [i for i, request in enumerate(step.requests) if request != gone]
    requests = tuple(step.requests[i] - (step.requests[i] > gone) for i in kept)
    if step.action == "fork" and len(requests) == 1:  # its parent is gone
        return Step("admit", requests)
    return dataclasses.replace(step, requests=requests, lengths=tuple(step.lengths[i] for i in kept if step.lengths))


def _merged(steps: Sequence[Step], number: int) -> tuple[Step, ...]:
    """The steps with the tokens of one added to the next growth of each of its requests; none where that can't be."""
    merged, brought = list(steps), dict(zip(steps[number].requests, steps[number].lengths, strict=False))
    if steps[number].action not in GROWTH:
        return ()
    for later in range(number + 1, len(steps)):
        step = steps[later]
        if step.action in GROWTH and not brought.keys().isdisjoint(step.requests):
            grown = zip(step.requests, step.lengths, strict=True)
            lengths = tuple(length + brought.pop(request, 0) for request, length in grown)
            merged[later] = dataclasses.replace(step, lengths=lengths)
    del merged[number]
    return () if brought else tuple(merged)


def _possible(case: ServingCase, steps: Sequence[Step]) -> bool:
    """Whether an engine could take the steps."""
    ledger = Ledger(case.config)
    for step in steps:
        if not _allowed(case, ledger, step):
            return False
        ledger.take(step)
    return True


def _allowed(case: ServingCase, ledger: Ledger, step: Step) -> bool:
    if step.action == "admit":
        return len(ledger.requests) < case.config.sequences
    known = step.requests[:1] if step.action == "fork" else step.requests
    if any(number not in ledger.requests for number in known) or sum(step.lengths) > case.config.tokens:
        return False
    done = [ledger.requests[number].done for number in known]
    match step.action:
        case "fork":
            return done[0] >= case.config.page_size and len(ledger.requests) < case.config.sequences
        case "attend":
            return all(length <= have for length, have in zip(step.lengths, done, strict=True))
        case "finish" | "evict":
            return done[0] > 0
    free, grown = ledger.free, list(zip(step.requests, step.lengths, strict=True))
    fits = all(length <= ledger.room(number, free) for number, length in grown)
    return fits and sum(ledger.needs(number, length) for number, length in grown) <= free
