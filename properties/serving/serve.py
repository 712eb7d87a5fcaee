"""Serving: the steps of a case taken by the engine and the kernels, and held against the model after each."""

import dataclasses

import numpy as np

from properties import bits
from properties.serving.batch import Batch
from properties.serving.case import ServingCase, SparseServingCase, Step
from properties.serving.engine import Engine
from properties.serving.ledger import Ledger, Span, Taken
from properties.trial import Trial


def serve(case: ServingCase, trial: Trial) -> None:
    """Take every step.

    Raises:
        Discrepancy: an output, a bit of the pool or an owner is wrong; its case ends with the step that showed it.
    """
    server = Server(case)
    for number in range(len(case.steps)):
        record = dataclasses.replace(trial.record, case=case.first(number + 1))
        server.take(number, dataclasses.replace(trial, record=record))


class Server:
    """The engine and the pool that the kernels return, beside the model's ledger and pool."""

    def __init__(self, case: ServingCase) -> None:
        self._case = case
        self._engine, self._ledger = Engine(case.config), Ledger(case.config)
        self._caches, self._model = case.pool(), case.pool()
        self._places: dict[int, int] = {}
        """Physical page of each page that the ledger names."""

    def take(self, number: int, trial: Trial) -> None:
        """Take step `number` and check what it left."""
        step = self._case.steps[number]
        taken, freed = self._ledger.take(step), self._drive(step, trial)
        self._poison(number, taken, freed)
        self._check_owners(trial)
        if taken.spans:
            self._run(Batch(self._case, number, taken.spans), trial)
        for name, want in self._model.items():
            trial.same_bits(bits.unsigned_view(self._caches[name]), bits.unsigned_view(want), "cache", f"pool {name}")

    def _drive(self, step: Step, trial: Trial) -> list[int]:
        """Let the engine take the step; returns the pages that it frees."""
        try:
            return self._engine.take(step)
        except (LookupError, ValueError) as error:
            trial.fail("crash", f"engine: {type(error).__name__}: {error}")

    def _poison(self, number: int, taken: Taken, freed: list[int]) -> None:
        """Let nothing of a freed page be left, in the engine's pool and, by its own account, in the model's."""
        if not taken.freed and not freed:
            return
        filled = self._case.freed(number)
        mine = [self._places.pop(page) for page in taken.freed]
        for caches, pages in ((self._caches, freed), (self._model, mine)):
            for name, cache in caches.items():
                cache[pages] = filled[name][pages]

    def _check_owners(self, trial: Trial) -> None:
        """Fail unless each page has one place, each place one page, and all other places are free."""
        owners: dict[int, int] = {}
        for number, request in self._ledger.requests.items():
            places = self._engine.pages(number)
            if len(places) != len(request.pages):
                trial.fail("cache", f"r{number} has {len(places)} pages, wanted {len(request.pages)}")
            for page, place in zip(request.pages, places, strict=True):
                if owners.setdefault(place, page) != page or self._places.setdefault(page, place) != place:
                    trial.fail("cache", f"page {place} of r{number} is owned twice, or has moved")
        free = sorted(set(range(self._case.config.pool)) - set(owners))
        if sorted(self._engine.free) != free:
            trial.fail("cache", f"free pages {sorted(self._engine.free)}, wanted {free}")

    def _run(self, batch: Batch, trial: Trial) -> None:
        sparse = isinstance(self._case, SparseServingCase)
        index = (self._engine.prefill_metadata if sparse else self._engine.dense_metadata)(batch.step)
        outputs = trial.run(batch.call(index, self._caches))
        inputs = batch.over_histories(index)
        expected, bound, *_ = trial.expect(inputs)
        trial.judge(inputs, outputs[0], expected, bound)
        if batch.step.action == "attend":
            return
        # A backend may hand out arrays that can't be written to.
        self._caches = {name: np.array(cache) for name, cache in zip(self._case.caches, outputs[1:], strict=True)}
        self._write(batch.spans)

    def _write(self, spans: tuple[Span, ...]) -> None:
        """Write new rows into the model's pool."""
        ps = self._case.config.page_size
        for span in spans:
            tokens = np.arange(span.first, span.last)
            places = np.array([self._places[page] for page in span.pages])
            slots = places[tokens // ps] * ps + tokens % ps
            for name, rows in self._case.parts(self._case.tokens.keys[list(span.history[span.first :])]).items():
                cache = self._model[name]
                cache.reshape(-1, cache.shape[-1])[slots] = rows
