"""Which of several drafters are asked: those with whom tokens per second are most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fakes import FREE, FakeTarget, ScriptedDrafter, chain_of, greedy, greedy_path, random_rule, run
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.drafters.joined import Joined
from forerun.engine.costs import Costs
from forerun.engine.engine import Engine
from forerun.engine.following import RECENT, UNASKED
from forerun.engine.plan import Plan
from forerun.engine.rounds import LEVELS
from forerun.engine.scheduler import Took, Turn
from forerun.models.cache import Span
from forerun.verify import make_verifier

COSTS = Costs({1: 10.0, 11: 14.0})
COUNTS, BOTH = 0, 1  # two ways: counts alone, counts and a network
LONGEST = 8


@dataclass
class World:
    """Steps of some requests, in a time of its own, with a drafter of two ways.

    chances: per way, the chance that a drafted token is right, by step and request. network:
    seconds of a round of the network for one request, of which half is the same for any number;
    that of counts takes a hundredth of a pass for each.
    """

    chances: tuple[Callable[[int, int], float], Callable[[int, int], float]]
    network: float
    once: float = 0.0  # further seconds of its first round
    requests: int = 1
    followed: bool = True
    plan: Plan = field(default_factory=lambda: Plan(COSTS, [False, True]))
    asked: list[list[int | None]] = field(default_factory=list)  # per step and request, the way
    took: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def run(self, steps: int, seed: int = 0) -> World:
        dice = np.random.default_rng(seed)
        streams = [_request(id) for id in range(self.requests)]
        for step in range(len(self.took), len(self.took) + steps):
            turns = [Turn(each, 1, True, True, followed=self.followed) for each in streams]
            for each, budget in zip(turns, self.plan.budgets(turns, 400), strict=True):
                each.budget = budget
            asked = [each for each in turns if each.budget]
            chance = {id: self.chances[each.way](step, id) for id, each in enumerate(turns)}
            for id, each in enumerate(turns):
                if each.budget:
                    each.draft = chain_of([1] * min(each.budget, LONGEST), chance[id])
                    each.drafting = 0.1
            spent = 0.1 * len(asked)
            if readers := [each for each in asked if each.way == BOTH]:
                spent += self.network * (1 + len(readers)) / 2 + self.once
                self.once = 0.0
                for each in readers:
                    each.drafting += self.network * (1 + 1 / len(readers)) / 2
            kept = self.plan.keep(turns, len(turns), spent) if asked else []
            for each, draft in zip(turns, kept, strict=bool(kept)):
                each.draft = draft
            for id, each in enumerate(turns):
                right = dice.random(len(each.draft)) < chance[id]
                each.verdict = Verdict(range(int(np.cumprod(right).sum())), 7)
            self.asked.append([each.way if each.budget else None for each in turns])
            self.tokens.append(sum(1 + len(each.verdict.path) for each in turns if each.verdict))
            rows = sum(1 + len(each.draft) for each in turns)
            self.took.append(spent + COSTS[rows])
            self.plan.learn(asked, Took(rows, self.took[-1], spent, self.plan.predict(turns)))
        return self

    def share(self, way: int, first: int = 0, last: int | None = None, id: int = 0) -> float:
        """Of the steps, those in which a request was asked for in this way."""
        return float(np.mean([step[id] == way for step in self.asked[first:last]]))

    def rate(self, first: int = 0) -> float:
        return sum(self.tokens[first:]) / sum(self.took[first:])


def _request(id: int) -> Request:
    span = Span(0, 3)
    span.length = 2
    return Request(id, [1] * 3, 3, SamplingParams(max_tokens=10**6), seed=0, span=span)


def _write_off(plan: Plan) -> None:
    """From now on a network is expected to be no help to anybody."""
    plan._ledgers[BOTH].rounds.learn(0, 1, 1.0)  # it was tried
    everybody = plan._ledgers[BOTH].all
    for _ in range(2000):
        everybody.expect([-1.0] * len(LEVELS), [1.0] * len(LEVELS))


def always(chance: float) -> Callable[[int, int], float]:
    return lambda step, id: chance


def best(chances: Sequence[float], network: float) -> float:
    """Tokens per second of the best way and length of chain."""
    rates = [
        sum(chance**depth for depth in range(nodes + 1))
        / (COSTS[1 + nodes] + 0.1 * (nodes > 0) + network * way * (nodes > 0))
        for way, chance in enumerate(chances)
        for nodes in range(LONGEST + 1)
    ]
    return max(rates)


# ---- what is worth its time ---------------------------------------------------------------------


@pytest.mark.parametrize("counts", [0.1, 0.5, 0.8])
def test_a_dear_network_that_adds_nothing_is_dropped(counts: float) -> None:
    world = World((always(counts), always(counts)), network=3.0).run(1500)
    assert world.share(BOTH, 200) < 0.05
    lost = 3.0 * world.share(BOTH, 200) / np.mean(world.took[200:])
    assert lost < 0.015
    assert world.rate(200) > 0.97 * best([counts, counts], 3.0)


@pytest.mark.parametrize(("counts", "both"), [(0.3, 0.7), (0.5, 0.7), (0.05, 0.6)])
def test_a_network_that_brings_more_than_it_takes_is_kept(counts: float, both: float) -> None:
    world = World((always(counts), always(both)), network=1.0).run(2000)
    assert world.share(BOTH, 300) > 0.9
    assert world.rate(300) > 0.95 * best([counts, both], 1.0)


@pytest.mark.parametrize(("network", "asked"), [(0.3, True), (8.0, False)])
def test_the_same_gain_pays_or_not_by_what_it_takes(network: float, asked: bool) -> None:
    """Small targets and large ones differ by nothing else."""
    world = World((always(0.5), always(0.65)), network).run(800)
    assert (world.share(BOTH, 200) > 0.5) is asked


def test_a_network_that_becomes_useful_is_found_again_and_dropped_again() -> None:
    world = World((always(0.4), lambda step, _: 0.8 if 800 <= step < 1600 else 0.4), network=2.0)
    world.run(2400)
    assert world.share(BOTH, 400, 800) < 0.1
    assert world.share(BOTH, 1300, 1600) > 0.9
    assert world.share(BOTH, 2100) < 0.1


def test_counts_that_become_as_good_alone_are_found_out() -> None:
    world = World((lambda step, _: 0.3 if step < 500 else 0.8, always(0.8)), network=2.0).run(2000)
    assert world.share(BOTH, 100, 500) > 0.9
    assert world.share(COUNTS, 1500) > 0.8


def test_of_several_requests_those_are_asked_for_whom_it_pays() -> None:
    world = World(
        (lambda _, id: 0.8 if id % 2 else 0.1, lambda _, id: 0.8 if id % 2 else 0.85),
        network=1.0,
        requests=4,
    ).run(1500)
    for id in range(4):
        way = COUNTS if id % 2 else BOTH
        assert world.share(way, 800, id=id) > 0.8


def test_who_is_not_followed_is_asked_without_the_network() -> None:
    world = World((always(0.7), always(0.9)), network=0.1, followed=False).run(100)
    assert world.share(COUNTS) == 1


@pytest.mark.parametrize("probed", [False, True])
def test_a_network_is_not_asked_in_earnest_before_a_probe(probed: bool) -> None:
    world = World((always(0.7), always(0.95)), network=0.1)
    if not probed:
        world.plan._probes._allowances = [-1e9] * 2
    world.run(200)
    assert (world.share(BOTH) > 0.8) == probed
    assert probed or world.share(COUNTS) == 1
    assert world.plan.follows(_request(101))


def test_what_a_network_does_only_once_is_not_taken_for_catching_up() -> None:
    world = World((always(0.3), always(0.95)), network=0.1, once=5.0).run(4000)
    assert world.share(BOTH, 3000) > 0.8


def test_hidden_states_are_kept_only_while_a_network_is_asked() -> None:
    world = World((always(0.7), always(0.7)), network=9.0)
    assert world.plan.follows(_request(0))
    _write_off(world.plan)
    world.plan._probes._allowances = [-1e9] * 2  # no probes
    world.run(3 * RECENT)
    asked = _request(0)
    asked.tokens += [1] * (UNASKED + 1)
    assert world.share(COUNTS) == 1
    assert not world.plan.follows(asked)
    assert not world.plan.follows(_request(101))


# ---- in the engine ------------------------------------------------------------------------------


def joined_engine(right: Callable[[Request, int], Draft]) -> tuple[Engine, ScriptedDrafter]:
    target = FakeTarget(random_rule(memory=3))
    counts, network = ScriptedDrafter(right), ScriptedDrafter(right, taps=(1,))
    counts.runs_network = False
    engine = Engine(
        target,
        store=target.new_store(512),
        verifier=make_verifier("follow"),
        drafter=Joined([counts, network]),
        costs=FREE,
    )
    return engine, network


def test_off_is_off_and_the_text_stays() -> None:
    rule = random_rule(memory=3)
    engine, network = joined_engine(
        lambda request, budget: chain_of(greedy_path(rule, request.tokens, 4)[:budget])
    )
    jobs = [([id, 2, 3], greedy(60)) for id in range(3)]
    truth = [greedy_path(rule, prompt, 60) for prompt, _ in jobs]
    called: Counter[bool] = Counter()
    script = network.script
    network.script = lambda *each: called.update([True]) or script(*each)
    assert run(engine, jobs) == truth
    assert called[True], "the control: it is asked at first"
    _write_off(engine.plan)
    engine.plan._probes._allowances = [-1e9] * 2
    called.clear()
    assert run(engine, jobs) == truth
    assert not called
