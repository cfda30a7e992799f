"""What a pass costs: the curve, what is measured, what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from fakes import FakeTarget, random_rule
from forerun.engine import costs as module
from forerun.engine.costs import Costs, Load, fit, loads, sample
from forerun.models.target import Segment


def test_costs_are_straight_lines_between_points() -> None:
    costs = Costs({1: 10.0, 8: 17.0, 32: 41.0})
    assert [costs[rows] for rows in (0, 1, 4, 8, 20, 32, 40)] == [10, 10, 13, 17, 29, 41, 49]


def test_more_rows_are_never_cheaper() -> None:
    costs = Costs({1: 10.0, 8: 9.0, 32: 12.0})
    assert [costs[1], costs[8], costs[20], costs[32]] == [9, 9, 10.5, 12]


def test_one_point_is_enough() -> None:
    assert Costs({1: 2.0})[100] == 2.0


def test_the_least_that_a_further_row_costs() -> None:
    costs = Costs({1: 10.0, 8: 17.0, 32: 29.0, 64: 93.0})
    assert [costs.least(rows) for rows in (0, 1, 9, 32, 500)] == pytest.approx([0, 0.5, 0.5, 2, 2])


def test_prefixes_and_sequences_cost_something() -> None:
    costs = Costs({1: 10.0, 9: 18.0}, sequence=2.0, key=0.1, row_key=0.01)
    assert costs.seconds([100, 50], [1, 3]) == pytest.approx(13 + 2 + 15 + 0.01 * 250)


def machine(load: Load) -> float:
    """Seconds, as a machine might take them."""
    rows, keys = load.sequences * load.rows, load.sequences * load.prefix
    curve = 10.0 + 0.5 * max(0, rows - 4)
    return curve + 0.3 * (load.sequences - 1) + keys * 0.002 + load.rows * keys * 0.0005


@pytest.mark.parametrize(("slots", "error"), [(4096, 0.05), (300, 0.2)])
def test_the_fit_predicts_what_was_not_measured(slots: int, error: float) -> None:
    costs = fit({load: machine(load) for load in loads(slots)})
    for held_out in (Load(1, 3, 700), Load(4, 2, 300), Load(16, 1, 100), Load(8, 4, 1000)):
        rows, prefixes = (
            [held_out.rows] * held_out.sequences,
            [held_out.prefix] * held_out.sequences,
        )
        assert costs.seconds(prefixes, rows) == pytest.approx(machine(held_out), rel=error)


def test_noise_makes_nothing_negative() -> None:
    seconds = {Load(1, 1): 10.0, Load(1, 8): 9.0, Load(1, 1, 64): 8.5, Load(1, 8, 64): 8.0}
    costs = fit(seconds | {Load(8, 1, 8): 8.0})
    assert (costs.key, costs.row_key, costs.sequence) == (0, 0, 0)


def test_measured_costs_follow_the_machine_and_given_ones_do_not() -> None:
    costs, given = fit({Load(1, 1): 1.0, Load(1, 8): 2.0}), Costs({1: 1.0, 8: 2.0})
    for _ in range(200):
        costs.correct(1, costs.seconds([9], [1]), 1.2)
        given.correct(1, given.seconds([9], [1]), 1.2)
    assert costs[1] == pytest.approx(1.2, rel=0.01)
    assert 2.1 < costs[8] < 2.3, "what was not seen follows, though not as far"
    assert given[1] == 1.0
    costs.correct(1, 1.2, 100.0)  # an interruption
    assert costs[1] < 1.28


def test_what_other_work_came_upon_is_no_more_than_what_more_rows_took() -> None:
    costs = fit(
        {Load(1, 1): 1.0, Load(1, 4): 7.0, Load(1, 8): 1.2, Load(1, 12): 9.0, Load(1, 32): 3.0}
    )
    assert [costs[1], costs[4], costs[8], costs[12], costs[32]] == [1.0, 1.2, 1.2, 3.0, 3.0]


def test_costs_of_many_rows_are_corrected_against_those_of_few() -> None:
    costs = fit({Load(1, 1): 1.0, Load(1, 8): 1.0, Load(1, 32): 2.0})
    for _ in range(200):
        for rows, seconds in ((1, 0.6), (8, 0.9), (20, 1.5)):
            costs.correct(rows, costs.seconds([0], [rows]), seconds)
    assert [costs[1], costs[8], costs[20]] == pytest.approx([0.6, 0.9, 1.5], rel=0.02)
    assert costs.least(1) == pytest.approx(0.3 / 7, rel=0.1)
    for _ in range(200):
        costs.correct(8, costs.seconds([0], [8]), 0.3)
    curve = costs.curve(0, 100)
    assert all(one <= more for one, more in pairwise(curve))


def test_loads_fit_into_the_store() -> None:
    for slots in (1, 10, 64, 5000):
        store = FakeTarget(random_rule()).new_store(slots)
        assert sample(FakeTarget(random_rule()), store, loads(slots))
        assert store.free_slots == slots
    assert loads(1) == [Load(1, 1)]


def test_a_slow_target_is_measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeTarget):
        def forward(self, segments: Sequence[Segment], *args: Any) -> Any:
            clock.now += 5.0 + 0.1 * sum(len(s.tokens) for s in segments)
            return super().forward(segments, *args)

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    target = Slow(random_rule())
    found = sample(target, target.new_store(256), loads(256))
    assert len(target.passes) == 2
    assert found == pytest.approx({Load(1, 1): 5.1, Load(1, 8): 5.8})
    assert fit(found)[16] == pytest.approx(6.6)
