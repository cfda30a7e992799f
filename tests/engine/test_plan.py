"""Which nodes are bought, and when a request stops drafting."""

from __future__ import annotations

import pytest
import torch

from fakes import chain_of
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.engine.costs import Costs
from forerun.engine.plan import LONGEST_PAUSE, Plan, Static
from forerun.engine.scheduler import Turn

TENTH = Costs({1: 10.0, 11: 20.0})  # a pass takes 9 + rows: a further row a tenth of one over 1


def request(id: int = 0, max_tokens: int = 100) -> Request:
    return Request(id, [1, 2, 3], 3, SamplingParams(max_tokens=max_tokens), seed=0)


def rate(costs: Costs, survival: list[float], rows: int, plain: int) -> float:
    return (plain + sum(survival)) / costs[rows + len(survival)]


def test_costs_are_straight_lines_between_points() -> None:
    costs = Costs({1: 10.0, 8: 17.0, 32: 41.0})
    assert [costs[rows] for rows in (0, 1, 4, 8, 20, 32, 40)] == [10, 10, 13, 17, 29, 41, 49]


def test_more_rows_are_never_cheaper() -> None:
    costs = Costs({1: 10.0, 8: 9.0, 32: 12.0})
    assert [costs[8], costs[20], costs[32]] == [10, 11, 12]


def test_one_point_is_enough() -> None:
    assert Costs({1: 2.0})[100] == 2.0


def test_likely_nodes_are_bought_and_unlikely_ones_are_not() -> None:
    draft = Draft([5, 6, 7], [-1, 0, -1], [0.9, 0.6, 0.05])
    (kept,) = Plan(TENTH).keep([draft], rows=1)
    assert (kept.tokens, kept.parents, kept.survival) == ([5, 6], [-1, 0], [0.9, 0.6])


def test_the_best_number_of_nodes_is_found() -> None:
    survival = [0.9**n for n in range(1, 41)]
    (kept,) = Plan(TENTH).keep([chain_of([5] * 40)], rows=1)
    best = max(range(41), key=lambda n: rate(TENTH, survival[:n], 1, 1))
    assert 0 < best < 40
    assert len(kept) == best


def test_rows_go_to_the_likelier_request() -> None:
    drafts = [chain_of([1, 1, 1], 0.2), chain_of([2, 2, 2], 0.9), Draft()]
    kept = Plan(TENTH).keep(drafts, rows=3)
    assert [len(draft) for draft in kept] == [0, 3, 0]


def test_free_rows_keep_all_and_dear_rows_none() -> None:
    drafts = [chain_of([1, 2, 3])]
    assert Plan(Costs({1: 1.0})).keep(drafts, rows=1) == drafts
    assert len(Plan(Costs({1: 1.0, 2: 3.0})).keep(drafts, rows=1)[0]) == 0


def test_tokens_drawn_from_a_law_are_never_dropped_for_their_value() -> None:
    drawn = Draft([5, 6], [-1, 0], [0.01, 0.001], probs_NV=torch.full((2, 8), 0.125))
    certain = Draft([5, 6], [-1, 0], [0.01, 0.001])
    kept = Plan(TENTH).keep([drawn, certain], rows=2)
    assert kept[0] is drawn
    assert len(kept[1]) == 0


def test_a_child_is_never_kept_without_its_parent() -> None:
    (kept,) = Plan(TENTH).keep([Draft([5, 6], [-1, 0], [0.01, 0.99])], rows=1)
    assert len(kept) == 0


def test_budgets_fit_the_rows_and_the_tokens_that_may_come() -> None:
    requests = [request(0), request(1, max_tokens=3), request(2, max_tokens=1)]
    assert Plan(TENTH).budgets(requests, rows_left=30) == [10, 2, 0]
    assert Plan(TENTH).budgets(requests, rows_left=2) == [0, 0, 0]
    assert Plan(TENTH).budgets([], rows_left=30) == []


@pytest.mark.parametrize(("accepted", "drafted"), [(0, 25), (4, 1000)])
def test_drafts_that_do_not_pay_become_rare(accepted: int, drafted: int) -> None:
    """Always wrong: pauses double up to the longest. Always right: every pass drafts."""
    plan = Plan(TENTH)
    one = request(max_tokens=2000)
    asked = 0
    pause = longest = 0
    for _ in range(1000):
        (budget,) = plan.budgets([one], rows_left=64)
        pause = 0 if budget else pause + 1
        longest = max(longest, pause)
        if budget:
            asked += 1
            verdict = Verdict(range(accepted), 7)
            turn = Turn(one, 1, True, True, budget, chain_of([1, 2, 3, 4]), verdict)
            plan.learn([turn], draft_seconds=0.0)
    assert asked <= drafted
    assert longest == (0 if accepted else LONGEST_PAUSE)
    if accepted:
        assert asked == drafted


def test_a_slow_drafter_counts_its_own_time() -> None:
    plan = Plan(TENTH)
    turn = Turn(request(), 1, True, True, 4, chain_of([1, 2]), Verdict([0], 7))
    plan.learn([turn], draft_seconds=15.0)  # one token won, one and a half passes lost
    assert plan.budgets([turn.request], rows_left=64) == [0]


def test_a_request_that_begins_to_repeat_itself_drafts_again() -> None:
    plan = Plan(TENTH)
    one = request(max_tokens=2000)
    for step in range(600):
        if plan.budgets([one], rows_left=64)[0]:
            verdict = Verdict([0, 1] if step > 300 else [], 7)
            plan.learn([Turn(one, 1, True, True, 4, chain_of([1, 2]), verdict)], 0.0)
    assert all(plan.budgets([one], rows_left=64)[0] for _ in range(50))


def test_a_static_plan_checks_all_and_never_pauses() -> None:
    plan, one = Static(), request(max_tokens=2000)
    hopeless = chain_of([1, 2, 3, 4], 0.01)
    assert plan.keep([hopeless], rows=1) == [hopeless]
    for _ in range(100):
        assert plan.budgets([one], rows_left=40) == [40]
        plan.learn([Turn(one, 1, True, True, 40, hopeless, Verdict([], 7))], draft_seconds=9.0)
