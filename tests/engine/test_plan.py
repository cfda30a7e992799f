"""Who is asked for drafts, which nodes are bought, and that drafts which do not pay become rare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fakes import chain_of
from forerun.core import Draft, Request, SamplingParams, Speculation, Verdict
from forerun.drafters.tree import prune
from forerun.engine.asking import improve
from forerun.engine.buying import buy, likely
from forerun.engine.costs import Costs
from forerun.engine.following import UNASKED
from forerun.engine.outlook import Trust, appraise
from forerun.engine.plan import ENOUGH, HOLD, REST, Plan
from forerun.engine.probing import PROBES
from forerun.engine.rounds import LEVELS, Rounds
from forerun.engine.scheduler import Took, Turn
from forerun.engine.static import Static
from forerun.models.cache import Span

TENTH = Costs({1: 10.0, 11: 20.0})  # a pass takes 9 + rows: a further row a tenth of one over 1
FREE_ROWS = Costs({1: 10.0})
SELDOM_ABOVE = [0.2, 0.4, 0.2, 0.17, 0.03]


def request(id: int = 0, max_tokens: int = 100, prefix: int = 2, **speculation: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, speculation=Speculation(**speculation))
    span = Span(0, prefix + 1)
    span.length = prefix
    return Request(id, [1] * (prefix + 1), prefix + 1, params, seed=0, span=span)


def turn(draft: Draft = Draft(), budget: int = 64, **values: Any) -> Turn:  # noqa: B008
    return Turn(request(**values), 1, True, True, budget, draft)


def keep(plan: Plan, *drafts: Draft, spent: float = 0.0) -> list[Draft]:
    turns = [turn(draft, id=i) for i, draft in enumerate(drafts)]
    return plan.keep(turns, len(turns), spent)


def rate(costs: Costs, survival: list[float], rows: int, plain: int) -> float:
    return (plain + sum(survival)) / costs[rows + len(survival)]


# ---- which nodes are bought ---------------------------------------------------------------------


def test_likely_nodes_are_bought_and_unlikely_ones_are_not() -> None:
    (kept,) = keep(Plan(TENTH), Draft([5, 6, 7], [-1, 0, -1], [0.9, 0.6, 0.05]))
    assert (kept.tokens, kept.parents, kept.survival) == ([5, 6], [-1, 0], [0.9, 0.6])


def test_the_best_number_of_nodes_is_found() -> None:
    survival = [0.9**n for n in range(1, 41)]
    (kept,) = keep(Plan(TENTH), chain_of([5] * 40))
    best = max(range(41), key=lambda n: rate(TENTH, survival[:n], 1, 1))
    assert 0 < best < 40
    assert len(kept) == best


def test_where_drafting_took_long_more_rows_are_worth_it() -> None:
    kept = [len(keep(Plan(TENTH), chain_of([5] * 40), spent=spent)[0]) for spent in (0.0, 10.0)]
    assert kept[0] < kept[1] < 40


def test_rows_go_to_the_likelier_request() -> None:
    drafts = [chain_of([1, 1, 1], 0.2), chain_of([2, 2, 2], 0.9), Draft()]
    assert [len(draft) for draft in keep(Plan(TENTH), *drafts)] == [0, 3, 0]


def test_free_rows_keep_all_and_dear_rows_none() -> None:
    drafts = [chain_of([1, 2, 3])]
    assert keep(Plan(FREE_ROWS), *drafts) == drafts
    assert len(keep(Plan(Costs({1: 1.0, 2: 3.0})), *drafts)[0]) == 0


def test_rows_behind_a_long_prefix_cost_more() -> None:
    costs = Costs({1: 10.0, 11: 12.0}, row_key=0.001)
    drafts = [turn(chain_of([5] * 8, 0.8), prefix=prefix) for prefix in (10, 20_000)]
    assert [len(Plan(costs).keep([each], 1, 0.0)[0]) for each in drafts] == [8, 1]


def test_prompts_in_the_same_pass_make_drafts_no_better() -> None:
    draft = chain_of([5] * 40)
    (alone,) = keep(Plan(TENTH), draft)
    (beside,) = Plan(TENTH).keep([turn(draft)], 500, 0.0)
    assert len(beside) == len(alone)


def test_tokens_drawn_from_a_law_are_never_dropped_for_their_value() -> None:
    drawn = Draft([5, 6], [-1, 0], [0.01, 0.001], probs_NV=torch.full((2, 8), 0.125))
    certain = Draft([5, 6], [-1, 0], [0.01, 0.001])
    kept = keep(Plan(TENTH), drawn, certain)
    assert kept[0] is drawn
    assert len(kept[1]) == 0


def test_a_child_is_never_kept_without_its_parent() -> None:
    (kept,) = keep(Plan(TENTH), Draft([5, 6], [-1, 0], [0.01, 0.99]))
    assert len(kept) == 0


def literal_rule(
    costs: Costs,
    turns: Sequence[Turn],
    trusts: Sequence[float],
    urgencies: Sequence[float],
    rows: int,
    spent: float,
) -> tuple[list[Draft], float]:
    """Every node of every draft weighed, one after the other; and the price of a further row."""
    chances: list[list[float]] = []
    for each, trust in zip(turns, trusts, strict=True):
        found: list[float] = []
        for parent, chance in zip(each.draft.parents, each.draft.survival, strict=True):
            found.append(min(chance, found[parent]) if parent >= 0 else chance)
        chances.append([min(1.0, trust * chance) for chance in found])
    whole = [each.draft.probs_NV is not None for each in turns]
    nodes = sorted(
        (-urgencies[i] * chance, i, node)
        for i, draft in enumerate(chances)
        for node, chance in enumerate(draft)
        if not whole[i]
    )
    prefixes = [each.request.cached for each in turns]
    base = rows + sum(len(each.draft) for each, all_ in zip(turns, whole, strict=True) if all_)
    keys = [costs.row_key * prefix for prefix in prefixes]
    tokens, seconds = float(len(turns)), costs.seconds(prefixes, [1] * len(turns)) + spent
    best, count, total = tokens / seconds, 0, 0.0
    for n, (minus_worth, i, _) in enumerate(nodes, 1):
        tokens -= minus_worth
        total += keys[i]
        rate = tokens / (seconds + costs[base + n] - costs[base] + costs.factor * total)
        if rate > best:
            best, count = rate, n
    kept = [
        prune(each.draft, [node for _, j, node in nodes[:count] if j == i])
        if not all_
        else each.draft
        for i, (each, all_) in enumerate(zip(turns, whole, strict=True))
    ]
    last = base + count
    return kept, best * (costs[last + 1] - costs[last] + costs.factor * sum(keys) / len(keys))


@pytest.mark.parametrize("seed", range(300))
def test_the_nodes_of_all_drafts_are_bought_by_the_literal_rule(seed: int) -> None:
    dice = np.random.default_rng(seed)
    points = np.cumsum(dice.exponential(size=6) * dice.integers(0, 2, 6)) + 5.0
    costs = Costs(
        dict(zip((1, 2, 8, 32, 64, 500), points.tolist(), strict=True)),
        row_key=float(dice.choice([0.0, 1e-5])),
    )
    costs.factor = float(dice.uniform(0.5, 2))
    turns = []
    for i in range(int(dice.integers(1, 33))):
        size = int(dice.integers(0, 33))
        parents = [int(dice.integers(-1, node)) for node in range(size)]
        survival: list[float] = []
        for parent in parents:  # many are equally likely, and some likelier than their parents
            above = survival[parent] if parent >= 0 else 1.0
            survival.append(above * float(dice.choice([0.3, 0.7, 0.9, 1.0, 1.01], p=SELDOM_ABOVE)))
        survival = np.minimum(survival, 1.0).tolist()
        law_NV = torch.ones(size, 1) if dice.random() < 0.1 else None
        draft = Draft(list(range(size)), parents, survival, law_NV)
        turns.append(turn(draft, id=i, prefix=int(dice.integers(1, 2000))))
    trusts = dice.choice([0.01, 0.5, 0.9, 1.0, 1.3], len(turns)).tolist()
    rows, spent = len(turns) + int(dice.integers(0, 40)), float(dice.choice([0.0, 3.0]))
    urgencies = dice.choice([0.2, 1.0, 1.0, 3.0], len(turns)).tolist()
    bought = buy(costs, turns, trusts, urgencies, rows, spent)
    kept, price = literal_rule(costs, turns, trusts, urgencies, rows, spent)
    assert [(list(each.tokens), list(each.parents)) for each in bought.kept] == [
        (list(each.tokens), list(each.parents)) for each in kept
    ]
    assert bought.price == pytest.approx(price, rel=1e-9)
    for each, trust, urgency, chances in zip(turns, trusts, urgencies, bought.likely, strict=True):
        every = likely(each.draft, trust, 0.0)
        least = price / urgency * (1 + 1e-9)
        assert {n: c for n, c in every.items() if c > least}.items() <= chances.items()


# ---- who is asked -------------------------------------------------------------------------------


def test_budgets_fit_the_rows_and_the_tokens_that_may_come() -> None:
    turns = [turn(id=0), turn(id=1, max_tokens=3), turn(id=2, max_tokens=1)]
    assert Plan(FREE_ROWS).budgets(turns, rows_left=30) == [15, 2, 0]
    assert Plan(FREE_ROWS).budgets(turns, rows_left=0) == [0, 0, 0]
    assert sum(Plan(FREE_ROWS).budgets(turns, rows_left=1)) == 1
    assert Plan(FREE_ROWS).budgets([], rows_left=30) == []


@pytest.mark.parametrize("plan", [Plan(FREE_ROWS), Static()])
def test_a_request_may_limit_its_drafts_or_refuse_them(plan: Plan) -> None:
    turns = [turn(id=0, max_draft_tokens=3), turn(id=1, enabled=False)]
    assert plan.budgets(turns, rows_left=60) == [3, 0]


@dataclass
class World:
    """Steps of some requests with a drafter that drafts chains, in a time of its own.

    chance: of a drafted token. told: what the drafter says it is. round: seconds for a number of
    requests and of nodes drafted for each.
    """

    plan: Plan
    chance: Callable[[int], float]
    told: Callable[[int], float] | None = None
    round: Callable[[int, int], float] = lambda requests, nodes: 0.0
    longest: int = 10
    requests: int = 1
    asked: list[list[int]] = field(default_factory=list)  # per step, the budgets
    drafted: float = 0.0  # seconds
    seconds: float = 0.0
    tokens: int = 0

    def run(self, steps: int) -> World:
        dice = np.random.default_rng(0)
        streams = [request(i, 10**6) for i in range(self.requests)]
        for _ in range(steps):
            turns = [Turn(each, 1, True, True) for each in streams]
            budgets = self.plan.budgets(turns, rows_left=400)
            self.asked.append(budgets)
            sizes = [min(budget, self.longest) for budget in budgets]
            for id, (each, budget, size) in enumerate(zip(turns, budgets, sizes, strict=True)):
                each.budget = budget
                each.draft = chain_of([1] * size, (self.told or self.chance)(id))
            spent = self.round(sum(size > 0 for size in sizes), max(sizes)) if any(sizes) else 0.0
            kept = self.plan.keep(turns, len(turns), spent) if spent or any(sizes) else []
            for each, draft in zip(turns, kept, strict=bool(kept)):
                each.draft = draft
            for id, each in enumerate(turns):
                right = dice.random(len(each.draft)) < self.chance(id)
                accepted = int(np.cumprod(right).sum())
                each.verdict = Verdict(range(accepted), 7)
                self.tokens += 1 + accepted
            passed = self.plan.costs[sum(1 + len(each.draft) for each in turns)]
            asked = [each for each in turns if each.budget]
            rows = sum(1 + len(each.draft) for each in turns)
            self.plan.learn(asked, Took(rows, spent + passed, spent, self.plan.predict(turns)))
            self.drafted += spent
            self.seconds += spent + passed
        return self

    @property
    def share_asked(self) -> float:
        return sum(any(budgets) for budgets in self.asked) / len(self.asked)

    @property
    def speedup(self) -> float:
        return self.tokens / self.seconds * self.plan.costs[self.requests] / self.requests


def test_a_drafter_that_is_right_is_asked_in_every_step() -> None:
    world = World(Plan(TENTH), lambda _: 0.9).run(300)
    assert world.share_asked == 1
    assert world.speedup > 1.8


def test_a_drafter_that_says_that_it_guesses_is_rarely_asked() -> None:
    world = World(Plan(TENTH), lambda _: 0.02, round=lambda *_: 1.0).run(2000)
    assert 0 < world.share_asked < 0.13
    assert world.drafted < 2 * PROBES * world.seconds
    assert world.speedup > 0.98


def test_a_drafter_that_is_wrong_and_does_not_know_it_is_rarely_asked() -> None:
    world = World(Plan(TENTH), lambda _: 0.0, told=lambda _: 0.9, round=lambda *_: 1.0)
    assert world.run(2000).speedup > 0.97


def test_probes_pay_for_the_first_row_that_they_add() -> None:
    """Where one further row is dear and those behind it are free, a probe is not free, too."""
    costs = Costs({1: 10.0, 2: 12.0, 64: 12.0})
    world = World(Plan(costs), lambda _: 0.0, told=lambda _: 0.9, round=lambda *_: 0.5)
    world.run(3000)
    assert 0 < world.share_asked < 0.05
    assert world.speedup > 0.985


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows whenever it is weighed whom to ask."""
    found: list[Any] = []

    def count(*args: Any) -> None:
        found.append(args)
        improve(*args)

    monkeypatch.setattr("forerun.engine.plan.improve", count)
    return found


def test_a_decision_stands_for_some_steps(weighed: list[Any]) -> None:
    world = World(Plan(TENTH), lambda _: 0.9).run(400)
    assert world.share_asked == 1
    assert len(weighed) < 400 / (1 + HOLD) + 20


def test_a_decision_stands_for_the_same_requests_alone(weighed: list[Any]) -> None:
    plan = Plan(TENTH)
    World(plan, lambda _: 0.9).run(41)
    for ids in ([0], [0], [0, 1], [0, 1], [1]):
        before = len(weighed)
        budgets = plan.budgets([turn(id=id) for id in ids], 64)
        assert len(budgets) == len(ids)
        assert all(budgets)
    assert len(weighed) == before + 1, "who has left is not asked"


def test_a_decision_ends_where_less_may_be_drafted() -> None:
    plan = Plan(FREE_ROWS)
    World(plan, lambda _: 0.9).run(41)
    for _ in range(1 + HOLD):
        (usual,) = plan.budgets([turn()], 64)
        (fewer,) = plan.budgets([turn(max_tokens=3)], 64)
        (tight,) = plan.budgets([turn()], 2)
        assert fewer == tight == 2 < usual


def test_a_plan_that_asks_nobody_rests(weighed: list[Any]) -> None:
    plan = Plan(TENTH, reads=[False])
    world = World(plan, lambda _: 0.0, round=lambda *_: 1.0).run(1000)
    assert world.share_asked > 0, "it is looked at again all the same"
    assert len(weighed) < 1000 / REST + 100


def test_a_plan_that_can_ask_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = 0
    decide = Plan._decide

    def count(*args: Any) -> Any:
        nonlocal decided
        decided += 1
        return decide(*args)

    monkeypatch.setattr(Plan, "_decide", count)
    plan = Plan(TENTH, reads=[True])
    left = turn()
    left.followed = False
    for _ in range(90):
        assert plan.budgets([left], 64) == [0]
    assert decided == 90 / (1 + REST)
    left.followed = True
    assert plan.budgets([left], 64) != [0]


def test_it_rests_also_when_a_probe_would_be_due() -> None:
    """Whoever is not followed cannot be probed, however much was saved for it."""
    plan = Plan(TENTH, reads=[True])
    World(plan, lambda _: 0.0, round=lambda *_: 1.0).run(500)
    left = turn(id=7)
    left.followed = False
    plan._probes._allowances = [1.0]
    plan.budgets([left], 64)
    assert sum(plan.rests([left]) for _ in range(2 * REST)) == REST


def test_a_probe_is_not_cut_in_half_by_a_rest() -> None:
    """Only its second step tells what a round takes."""
    world = World(Plan(TENTH, reads=[False]), lambda _: 0.0, round=lambda *_: 0.1).run(3000)
    asked = [step for step, (budget,) in enumerate(world.asked) if budget and step > 200]
    assert len(asked) > 10
    assert all({step - 1, step + 1} & {*asked} for step in asked[1:-1])


def test_a_slow_drafter_is_not_asked_however_good() -> None:
    """89 % of the tokens accepted, but a token of the drafter takes as long as a pass."""
    world = World(Plan(FREE_ROWS), lambda _: 0.89, round=lambda _, nodes: 10.0 * nodes).run(1000)
    assert world.share_asked < 0.1
    assert world.speedup > 0.97


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8])
def test_the_depth_that_is_best_for_a_slow_drafter_is_found(chance: float) -> None:
    """Every drafted token costs a fifth of a pass, so a chain is worth little beyond its best."""

    def speedup(nodes: int) -> float:
        expected = 1 + sum(chance**depth for depth in range(1, nodes + 1))
        return expected / (TENTH[1 + nodes] + 2.0 * nodes) * TENTH[1]

    best = max(map(speedup, range(11)))
    world = World(Plan(TENTH), lambda _: chance, round=lambda _, nodes: 2.0 * nodes).run(1500)
    assert world.speedup > 0.96 * best


def test_of_several_requests_those_are_asked_for_whom_it_pays() -> None:
    world = World(
        Plan(TENTH),
        lambda id: 0.9 if id % 2 else 0.05,
        round=lambda requests, nodes: 0.2 * requests * nodes,
        requests=4,
    ).run(600)
    asked = np.array(world.asked[200:]) > 0
    assert asked[:, [1, 3]].mean() > 0.95
    assert asked[:, [0, 2]].mean() < 0.15


def test_a_text_that_begins_to_repeat_itself_is_drafted_again() -> None:
    plan = Plan(TENTH)
    world = World(plan, lambda _: 0.9 if len(world.asked) > 1000 else 0.02, round=lambda *_: 0.5)
    world.run(1400)
    asked = [any(budgets) for budgets in world.asked]
    assert sum(asked[500:1000]) <= 100
    assert sum(asked[1300:]) == 100


class Eager(Plan):
    """Learns from every step at once."""

    def learn(self, asked: Sequence[Turn], took: Took) -> None:
        super().learn(asked, took)
        self._catch_up()


@pytest.mark.parametrize("stands", [False, True])
def test_steps_are_learned_from_before_anything_is_decided(
    stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stands:
        monkeypatch.setattr("forerun.engine.plan.HOLD", 0)
        monkeypatch.setattr("forerun.engine.plan.REST", 0)

    def run(plan: Plan) -> World:
        changing = [0.2, 0.8, 0.5, 0.02]
        world = World(plan, lambda _: changing[len(world.asked) // 100 % 4])
        world.round = lambda requests, nodes: 0.1 * requests * nodes
        return world.run(600)

    late, early = run(Plan(learning())), run(Eager(learning()))
    assert (late.asked == early.asked) != stands
    assert stands or (late.tokens, late.seconds) == (early.tokens, early.seconds)


@pytest.mark.parametrize(("requests", "learned"), [(1, 400), (2, 800), (16, 1600)])
def test_many_promises_tell_as_much_as_some_of_them(
    requests: int, learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one or two drafts a step, all are learned from; from 16, those of every fourth step."""
    assert 2 * (1 + HOLD) <= ENOUGH < 16
    calls = 0

    def count(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return appraise(*args)

    monkeypatch.setattr("forerun.engine.plan.appraise", count)
    world = World(Plan(FREE_ROWS), lambda _: 0.9, requests=requests).run(400)
    assert world.share_asked == 1
    assert learned - 200 < calls < 1.5 * learned


def learning() -> Costs:
    return Costs({1: 10.0, 11: 20.0}, learns=True)


def test_nothing_is_kept_of_requests_that_ended_while_a_decision_stood() -> None:
    plan = Plan(TENTH)
    World(plan, lambda _: 0.9).run(50)
    assert plan._lessons
    plan.forget(request(0))
    assert not plan._lessons
    assert not any(ledger._outlooks for ledger in plan._ledgers)
    assert not plan._trusts._each


def test_a_plan_that_is_not_asked_any_more_does_not_keep_steps_for_ever() -> None:
    plan = Plan(TENTH)
    for _ in range(100):
        plan.learn([], Took(1, 10.0, 0.0))
        assert len(plan._lessons) <= REST


def test_a_promise_is_learned_from_once() -> None:
    plan, asked = Plan(FREE_ROWS), turn(chain_of([1], 0.8), budget=1)
    plan.keep([asked], 1, 0.0)
    asked.verdict = Verdict([0], 7)
    plan.learn([asked], Took(2, 10.0, 0.0))
    plan.learn([], Took(1, 10.0, 0.0))
    assert [len(lesson.promises) for lesson in plan._lessons] == [1, 0]


def test_a_new_request_begins_with_what_is_known_of_all() -> None:
    plan = Plan(TENTH)
    World(plan, lambda _: 0.02, round=lambda *_: 1.0).run(500)
    plan._probes._allowances = [-1.0]  # no probes for now
    assert plan.budgets([turn(id=99)], 64) == [0]
    assert 99 in plan._ledgers[0]._outlooks
    plan.follows(request(99))
    plan.forget(request(99))
    assert 99 not in plan._ledgers[0]._outlooks
    assert 99 not in plan._following._standings


def test_hidden_states_are_kept_only_for_those_who_may_draft() -> None:
    plan = Plan(TENTH)
    one = request(0, prefix=1000)
    assert plan.follows(one)
    assert not plan.follows(request(1, enabled=False))
    one.tokens += [1] * UNASKED
    assert plan.follows(one)
    one.tokens += [1]
    assert not plan.follows(one), "it was not asked for too long"
    assert not plan.follows(one)
    World(plan, lambda _: 0.0, round=lambda *_: 20.0).run(500)
    assert [plan.follows(request(id)) for id in (96, 97, 98, 99)] == [True] + [False] * 3


def test_a_static_plan_checks_all_and_always_asks() -> None:
    plan, hopeless = Static(), chain_of([1, 2, 3, 4], 0.01)
    assert keep(plan, hopeless) == [hopeless]
    for _ in range(100):
        assert plan.budgets([turn()], rows_left=40) == [40]
        plan.learn([turn(hopeless)], Took(5, 10.0, 9.0))


# ---- what is expected ---------------------------------------------------------------------------


def weigh(
    survival: Sequence[float], budget: int = 64, whole: bool = False, price: float = 0.1
) -> tuple[list[float], list[float]]:
    """Worths and passes, at each level."""
    return appraise(survival, len(survival), budget, whole, price)


def one(survival: Sequence[float], budget: int = 64, whole: bool = False) -> list[float]:
    return weigh(survival, budget, whole)[0]


def test_worth_is_survival_beyond_the_price_of_rows() -> None:
    assert one([0.5, 0.9, 0.05])[:4] == pytest.approx([0.8, 1.2, 1.2, 1.2])


def test_a_draft_that_must_be_bought_whole_may_lose() -> None:
    assert one([0.5, 0.05, 0.01], whole=True)[:5] == pytest.approx([0.4, 0.35, 0.26, 0.26, 0.26])


def test_a_draft_as_large_as_its_budget_would_have_gone_on() -> None:
    cut = one([0.9, 0.81], budget=2)
    assert cut[:3] == pytest.approx([0.8, 1.51, 1.51 + 0.9**3 - 0.1])
    assert one([0.9, 0.81])[2] == pytest.approx(1.51)


def test_a_long_draft_stands_for_all_the_passes_that_short_ones_would_take() -> None:
    worths, passes = weigh([1.0] * 11, budget=64, price=0.0)
    assert worths[LEVELS.index(3)] == 3
    assert passes[LEVELS.index(3)] == 12 / 4
    assert passes[LEVELS.index(12)] == 1


def test_a_short_draft_that_would_have_gone_on_stands_for_less_than_a_pass_of_longer_ones() -> None:
    _, passes = weigh([1.0] * 3, budget=3, price=0.0)
    assert passes[LEVELS.index(3)] == 1
    assert passes[LEVELS.index(8)] == 4 / 9


def test_a_drafter_that_is_better_than_it_says_is_not_expected_to_do_wonders() -> None:
    plan, modest = Plan(FREE_ROWS), turn(chain_of([1], 0.8), budget=1)
    modest.verdict = Verdict([0], 7)
    for _ in range(20):
        plan.keep([modest], 1, 0.0)
        plan.learn([modest], Took(2, 10.0, 0.0, 10.0))
    (trust,) = plan._trusts.believe([modest.request])
    assert trust > 1.15
    worths = plan._ledgers[0].worths(modest.request)
    assert all(worth <= nodes for worth, nodes in zip(worths, LEVELS, strict=True))


def test_promises_that_are_not_kept_lose_their_weight() -> None:
    trust = Trust(Trust())
    assert trust.honesty == 1
    for _ in range(100):
        trust.settle(promised=3.0, accepted=0)
    assert trust.honesty < 0.3
    for _ in range(400):
        trust.settle(promised=1.0, accepted=3)
    assert trust.honesty > 1.15


def test_a_drafter_that_is_never_right_loses_all_trust() -> None:
    everybody = Trust()
    for _ in range(1000):
        everybody.settle(promised=8.0, accepted=0)
    assert everybody.honesty < 1e-3
    everybody.settle(promised=8.0, accepted=8)
    assert everybody.honesty > 0.01, "which can come back"


def test_what_is_found_out_about_all_requests_counts_for_each() -> None:
    everybody = Trust()
    one = Trust(everybody)
    everybody.settle(promised=100.0, accepted=0)
    assert one.honesty == everybody.honesty < 0.05
    everybody.settle(promised=100.0, accepted=100)
    assert one.honesty == everybody.honesty > 0.5


def test_rounds_that_were_never_asked_for_look_cheap_and_others_are_known() -> None:
    rounds = Rounds()
    assert not any(rounds.seconds(2))
    rounds.learn(LEVELS.index(4), 1, 0.4)
    rounds.learn(LEVELS.index(8), 1, 0.6)
    table = rounds.seconds(1)
    assert [table[LEVELS.index(nodes)] for nodes in (1, 2, 4, 6, 8, 64)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.5, 0.6, 0.6]
    )


def test_rounds_that_once_looked_cheap_do_not_stay_so() -> None:
    rounds = Rounds()
    for seconds in [1e-9] + [1.0] * 200:
        rounds.learn(3, 1, seconds)
    assert rounds.seconds(1)[3] > 0.5


def test_rounds_learn_what_a_request_costs_and_ignore_interruptions() -> None:
    rounds = Rounds()
    dice = np.random.default_rng(1)
    for i in range(200):
        requests = int(dice.integers(1, 9))
        rounds.learn(3, requests, 9.0 if i % 50 == 49 else 0.2 + 0.1 * requests)
    assert [rounds.seconds(1)[3], rounds.seconds(8)[3]] == pytest.approx([0.3, 1.0], rel=0.25)
