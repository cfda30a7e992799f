"""Drafters that look up what may follow, one request at a time, without a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.counting import CountingRounds
from forerun.drafters.laws import SILENT, Law
from forerun.drafters.sources import Source
from forerun.drafters.tree import best_first


class Lookup(Drafter):
    """Proposes for each request by itself; what becomes of it is learned by one calibration."""

    runs_network = False

    def __init__(self, options: Settings, context: DraftContext) -> None:
        super().__init__(options, context)
        self._calibration = Calibration()

    @abstractmethod
    def _propose(self, request: Request, budget: int) -> Draft:
        """See `Drafter.propose`; made by `_calibration`."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(*each) for each in zip(requests, budgets, strict=True)]

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request in requests:
            self._calibration.settle(request)

    def release(self, request: Request) -> None:
        self._calibration.forget(request)


class LawLookup(Lookup):
    """A lookup that knows a law on every path: it proposes the most probable ones, all requests in
    one compiled call where it has such `_rounds`."""

    makes_trees = True
    _rounds: CountingRounds | None = None

    @abstractmethod
    def _law(self, request: Request) -> Law:
        """What it knows of a request now."""

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        return [
            self._law(request) if budget > 0 and request.remaining > 1 else SILENT
            for request, budget in zip(requests, budgets, strict=True)
        ]

    @property
    def has_sources(self) -> bool:
        return self._rounds is not None

    def sources(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Source]:
        assert self._rounds
        return [
            self._rounds.source(request) if budget > 0 and request.remaining > 1 else Source()
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        if not self._rounds:
            return super().propose(requests, budgets)
        able = [i for i, each in enumerate(requests) if budgets[i] > 0 and each.remaining > 1]
        drafts = [Draft()] * len(requests)
        asked, nodes = [requests[i] for i in able], [budgets[i] for i in able]
        found = self._rounds.propose(asked, nodes, self._calibration)
        for i, draft in zip(able, found, strict=True):
            drafts[i] = draft
        return drafts

    def release(self, request: Request) -> None:
        if self._rounds:
            self._rounds.release(request)
        super().release(request)

    def _propose(self, request: Request, budget: int) -> Draft:
        if budget <= 0 or request.remaining <= 1:
            return Draft()
        law = self._law(request)
        draft = best_first(
            law.root,
            law.successors,
            law.advance,
            nodes=min(budget, law.nodes),
            depth=min(law.depth, request.remaining - 1),
            floor=law.floor,
            ends=request.stop_ids,
        )
        if not draft.tokens:
            return draft
        return self._calibration.correct(request, draft, law.floor)
