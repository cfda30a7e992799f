"""Two drafters that are told the same: one drafts in compiled rounds, the other step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from drafting import check, refuse, request
from forerun.core import Draft, Request, Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.tree import path
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel


class Twins:
    def __init__(self, target: LoadedModel, spec: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.info = target.target.info
        context = DraftContext(target.target, target.target.new_store(1024), None, refuse)
        self.whole, self.stepwise = (self.made(spec, context) for _ in range(2))
        self.stepwise._runner.rounds = None

    def made(self, spec: str, context: DraftContext) -> Any:
        drafter: Any = make_drafter(spec, context)
        assert drafter._runner.rounds is not None
        return drafter

    def start(self, id: int, rows: int, stop: Sequence[int] = (), **values: Any) -> Request:
        started = request(self.tokens(rows + 1), id=id, max_tokens=300, stop=stop, **values)
        started.span = Span(0, 300)
        self.observe(started, rows)
        return started

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(250) for _ in range(count)]

    def observe(self, request: Request, rows: int) -> None:
        assert request.span
        request.span.length += rows
        shape = (rows, len(self.whole.taps), self.info.hidden_size)
        taps_RTC = torch.randn(shape, generator=self.noise).to(self.info.dtype)
        for drafter in (self.whole, self.stepwise):
            drafter.observe([request], [Verdict((), request.tokens[-1])], [taps_RTC])

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """What both propose, number for number."""
        drafts: list[Draft] = self.whole.propose(requests, budgets)
        for draft in drafts:
            check(draft)
        assert drafts == self.stepwise.propose(requests, budgets)
        return drafts

    def go_on(self, request: Request, draft: Draft) -> None:
        """Commit some path of a draft and a token more."""
        node = self.dice.randrange(-1, len(draft))
        accepted = [draft.tokens[n] for n in path(draft.parents, node)]
        request.tokens += [*accepted, *self.tokens(1)]
        self.observe(request, len(accepted) + 1)

    def live(self, turns: int) -> set[int]:
        """Requests of several lengths, one of which comes late and ends often; budgets that differ;
        pauses; beliefs that prove wrong. The sizes of trees that were seen."""
        requests = [self.start(id, rows) for id, rows in enumerate((9, 40, 3))]
        sizes = set()
        for turn in range(turns):
            if turn == 4:
                requests.append(self.start(9, 17, stop=range(0, 250, 3)))
            budgets = [self.dice.choice([0, 1, 4, 64, 64]) for _ in requests]
            drafts = self.propose(requests, budgets)
            sizes |= {len(draft) for draft in drafts}
            for asked, draft in zip(requests, drafts, strict=True):
                self.go_on(asked, draft)
            if turn % 3 == 2:
                self.go_on(requests[0], Draft())  # steps without a proposal leave two rows due
        assert self.ratios == list(self.stepwise._calibration.ratios)
        return sizes

    @property
    def ratios(self) -> list[float]:
        return list(self.whole._calibration.ratios)
