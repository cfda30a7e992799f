"""Two drafters that are told the same: one drafts in compiled rounds, the other step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drafting import check, refuse, request
from forerun.core import Draft, Request, Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.tree import path
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel

SAMPLED: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 3.0, "top_k": 7, "top_p": 0.6},
    {"temperature": 0.3, "min_p": 0.02, "top_p": 0.9},
    {"temperature": 100.0, "top_k": 200},
]


class Twins:
    def __init__(self, target: LoadedModel, spec: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.exact = True
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
        """What both propose: number for number, until a request samples; then the last bits of
        noise may differ, and of all that is learned."""
        drafts: list[Draft] = self.whole.propose(requests, budgets)
        others: list[Draft] = self.stepwise.propose(requests, budgets)
        for draft in drafts:
            check(draft)
        self.exact &= all(asked.params.greedy for asked in requests)
        assert drafts == others or not self.exact
        for draft, other in zip(drafts, others, strict=True):
            assert (draft.tokens, draft.parents) == (other.tokens, other.parents)
            assert draft.survival == pytest.approx(other.survival, rel=0, abs=1e-5)
        return drafts

    def go_on(self, request: Request, draft: Draft) -> None:
        """Commit some path of a draft and a token more."""
        node = self.dice.randrange(-1, len(draft))
        accepted = [draft.tokens[n] for n in path(draft.parents, node)]
        request.tokens += [*accepted, *self.tokens(1)]
        self.observe(request, len(accepted) + 1)

    def live(self, turns: int, **values: Any) -> set[int]:
        """Requests of several lengths, one of which comes late and ends often; budgets that differ;
        pauses; beliefs that prove wrong. The sizes of trees that were seen. values: how the first
        requests choose their tokens; the late one is greedy."""
        requests = [self.start(id, rows, **values) for id, rows in enumerate((9, 40, 3))]
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
        assert self.ratios == pytest.approx(list(self.stepwise._calibration.ratios), rel=1e-5)
        return sizes

    @property
    def ratios(self) -> list[float]:
        return list(self.whole._calibration.ratios)
