"""Texts that are waited for together: all done as soon as can be."""

from __future__ import annotations

import random

import pytest

from fakes import chain_of
from forerun.core import Request, SamplingParams, Verdict
from forerun.engine.costs import Costs
from forerun.engine.plan import Plan
from forerun.engine.scheduler import Took, Turn
from forerun.engine.urgency import urgencies
from forerun.models.cache import Span

MEMORY = Costs({1: 9.0, 8: 11.0, 16: 13.0, 64: 33.0})  # most of a pass is there with one row, too
ROWS = Costs({1: 1.0, 64: 64.0})  # a pass takes what its rows take


def request(id: int, remaining: int, call: int | None = 0) -> Request:
    span = Span(0, 9)
    span.length = 4
    return Request(
        id, [1] * 5, 5, SamplingParams(max_tokens=remaining), seed=0, span=span, call=call
    )


def test_who_is_behind_is_urgent() -> None:
    requests = [request(id, left) for id, left in enumerate((10, 40, 80))]
    ahead, middle, behind = (urgencies(requests, MEMORY)[id] for id in range(3))
    assert 0 < ahead < middle < 1 < behind
    assert ahead + middle + behind == pytest.approx(3)


def test_a_lead_counts_by_what_is_left() -> None:
    def lead(left: int) -> float:
        return urgencies([request(0, left - 8), request(1, left)], MEMORY)[1]

    assert lead(2000) == pytest.approx(1, abs=0.03), "texts may end any time before that"
    assert lead(2000) < lead(100) < lead(20)


def test_all_are_alike_where_nobody_waits_for_others() -> None:
    assert urgencies([request(0, 9, call=None), request(1, 99, call=None)], MEMORY) == {}
    assert urgencies([request(0, 9, call=0), request(1, 99, call=1)], MEMORY) == {}
    assert urgencies([request(0, 50), request(1, 50)], MEMORY) == pytest.approx({0: 1, 1: 1})


def test_all_are_alike_where_rows_take_all_the_time() -> None:
    assert urgencies([request(0, 9), request(1, 99)], ROWS) == pytest.approx({0: 1, 1: 1})


def test_calls_do_not_compete() -> None:
    requests = [
        *(request(id, left, call=0) for id, left in enumerate((10, 80))),
        request(2, 5, call=None),
        *(request(id, left, call=3) for id, left in enumerate((60, 60), 3)),
    ]
    found = urgencies(requests, MEMORY)
    assert set(found) == {0, 1, 3, 4}
    assert found[0] + found[1] == pytest.approx(2)
    assert found[3] == found[4] == pytest.approx(1)


def finish(call: int | None, chances: list[float], crowded: bool = False) -> tuple[float, float]:
    """Seconds until all of them have 96 tokens, and the mean over them."""
    plan, dice = Plan(MEMORY, reads=[False]), random.Random(0)
    running = [request(id, 96, call) for id in range(len(chances))]
    now, ends = 0.0, []
    while running:
        turns = [Turn(each, 1, True, True) for each in running]
        budgets = plan.budgets(turns, 400, crowded)
        spent = 1.0 if any(budgets) else 0.0
        for turn, budget in zip(turns, budgets, strict=True):
            turn.budget = budget
            turn.draft = chain_of([1] * min(budget, 4), chances[turn.request.id])
        if spent:
            for turn, draft in zip(turns, plan.keep(turns, len(turns), spent), strict=True):
                turn.draft = draft
        rows = sum(1 + len(turn.draft) for turn in turns)
        predicted = plan.predict(turns)
        for turn in turns:
            accepted = 0
            while accepted < len(turn.draft) and dice.random() < chances[turn.request.id]:
                accepted += 1
            turn.verdict = Verdict(range(accepted), 1)
            turn.request.tokens += [1] * (1 + accepted)
        now += spent + MEMORY[rows]
        asked = [turn for turn in turns if turn.budget]
        plan.learn(asked, Took(rows, spent + MEMORY[rows], spent, predicted))
        for each in running:
            if each.remaining <= 0:
                plan.forget(each)
                ends.append(now)
        running = [each for each in running if each.remaining > 0]
    return now, sum(ends) / len(ends)


@pytest.mark.parametrize(
    "chances",
    [
        [0.9, 0.9, 0.8, 0.8, 0.7, 0.6, 0.3, 0.1],
        [0.9] * 4 + [0.6] * 4,
        [0.7, 0.7, 0.6, 0.6, 0.5, 0.5, 0.4, 0.4],
    ],
)
def test_the_last_is_done_earlier(chances: list[float]) -> None:
    alone, alone_mean = finish(None, chances)
    together, together_mean = finish(0, chances)
    assert together < 0.97 * alone
    assert alone_mean < together_mean < 96 * MEMORY[8], "who is ahead waits, not longer than before"
    assert finish(0, chances, crowded=True) == (alone, alone_mean), "places are wanted"
