"""Forecasts of curves that are known exactly."""

from __future__ import annotations

import math

import pytest

from forerun.errors import ConfigError
from forerun.train.forecast import Point, forecast, learned
from forerun.train.recipe import Recipe

STEPS = (30, 50, 70, 100)
AHEAD = 4


def length(steps: float, level: float, growth: float) -> float:
    return 1 + AHEAD / (1 + math.exp(-level - growth * math.log(steps)))


def curve(level: float, growth: float, steps: tuple[int, ...] = STEPS) -> list[Point]:
    return [Point(t, length(t, level, growth), drafts=100 + t) for t in steps]


@pytest.mark.parametrize(("level", "growth"), [(-4.0, 0.6), (-8.0, 1.2), (-1.0, 0.05)])
def test_a_curve_of_the_law_is_continued(level: float, growth: float) -> None:
    found = forecast(curve(level, growth), AHEAD, 1000)
    assert found.likely == pytest.approx(length(1000, level, growth))
    assert 1 < found.low < found.likely < found.high < 1 + AHEAD


def test_the_low_end_is_half_the_growth_less_noise() -> None:
    many = [Point(p.steps, p.length, 1e12) for p in curve(-4.0, 0.6)]
    slowed = length(100 * math.sqrt(10), -4.0, 0.6)  # half of the way, on a scale of logarithms
    found = forecast(many, AHEAD, 1000)
    assert found.low == pytest.approx(slowed, rel=1e-4)
    assert found.high == pytest.approx(found.likely, rel=1e-4)


def test_a_flat_curve_stays_flat() -> None:
    assert forecast(curve(-1.0, 0.0), AHEAD, 1e6).likely == pytest.approx(length(1, -1.0, 0.0))


def test_a_falling_curve_is_taken_for_a_flat_one() -> None:
    falling = curve(-1.0, -0.3)
    found = forecast(falling, AHEAD, 1000)
    lengths = [point.length for point in falling]
    assert min(lengths) < found.likely < max(lengths)


def test_two_trials_make_a_line_and_one_makes_none() -> None:
    two = forecast(curve(-4.0, 0.6, (50, 100)), AHEAD, 1000)
    four = forecast(curve(-4.0, 0.6), AHEAD, 1000)
    assert two.likely == pytest.approx(length(1000, -4.0, 0.6))
    assert two.high - two.low > four.high - four.low
    with pytest.raises(ConfigError, match="two trials at least"):
        forecast(curve(-4.0, 0.6, (100,)), AHEAD, 1000)


def test_trials_that_scatter_widen_the_range() -> None:
    smooth = curve(-4.0, 0.6)
    rough = [
        Point(p.steps, p.length + (-1) ** place * 0.2, p.drafts) for place, p in enumerate(smooth)
    ]
    assert forecast(rough, AHEAD, 200).high > forecast(smooth, AHEAD, 200).high


def test_nothing_and_everything_accepted_tell_little_and_stay_within_bounds() -> None:
    none = forecast([Point(t, 1.0, 100) for t in STEPS], AHEAD, 1000)
    every = forecast([Point(t, 1.0 + AHEAD, 100) for t in STEPS], AHEAD, 1000)
    assert 1 < none.low < none.likely < 1.05
    assert none.likely + 1 < none.high < 1 + AHEAD
    assert 1 < every.low < every.likely < every.high < 1 + AHEAD
    assert every.likely > AHEAD + 0.95


@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5])
def test_steps_of_the_warm_up_count_by_their_rate(warmup: float) -> None:
    recipe = Recipe(kind="eagle3", tokens=1, lr=1.0, warmup=warmup)
    warm = recipe.warm(200)
    for step in range(warm + 1):
        assert learned(step, warm) == pytest.approx(sum(recipe.rate(s, 200) for s in range(step)))
    assert learned(warm + 7, warm) == learned(warm, warm) + 7
