"""What a run will reach, from trials of its beginning.

    s = (A - 1) / K              A: mean acceptance length, K: tokens that are drafted ahead
    logit s = level + growth * log t

s is the share of what is drafted that is accepted: it lies between 0 and 1, so that a line through
its log-odds cannot leave what is possible. While s is small, the accepted tokens grow as a power of
the steps t. The line is fitted by least squares, each trial weighted by how many drafts it counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import ConfigError

SIGMAS = 2.0  # of counting noise, to either side
SLOWED = 0.5  # share of the growth that goes on, at the lower end of a forecast


@dataclass(frozen=True, slots=True)
class Point:
    """A trial: after how many steps (see `learned`), A, and the mean of how many drafts it is."""

    steps: float
    length: float
    drafts: float


@dataclass(frozen=True, slots=True)
class Range:
    """A figure that is not known yet."""

    low: float
    likely: float
    high: float

    def __str__(self) -> str:
        return f"{self.likely:.2f} ({self.low:.2f} to {self.high:.2f})"

    def __truediv__(self, cost: float) -> Range:
        return Range(self.low / cost, self.likely / cost, self.high / cost)


def learned(step: int, warm: int) -> float:
    """Steps, those of the first `warm`, over which the learning rate rises, by their rate.

    Where the rate sinks at the end of a run, steps count as whole ones: what is learned more slowly
    then is made up for by less noise.
    """
    if step < warm:
        return step * (step + 1) / (2 * warm)
    return step - max(0, warm - 1) / 2


def forecast(points: Sequence[Point], ahead: int, steps: float) -> Range:
    """The acceptance length after so many steps. ahead: K.

    likely: the growth goes on. From low to high: noise of the trials (as it was counted, or as they
    scatter about the line if that is more), and at the low end only half of the growth, since it
    slows down once texts are seen again and again. A curve that falls is taken for a flat one: the
    best draft is kept. Raises `ConfigError` for fewer than two points.
    """
    if len({point.steps for point in points}) < 2:
        raise ConfigError("two trials at least are needed for a forecast; give a larger budget")
    x = [math.log(point.steps) for point in points]
    y, weights = zip(*(_log_odds(point, ahead) for point in points), strict=True)
    total = sum(weights)
    mean_x, mean_y = (_dot(weights, values) / total for values in (x, y))
    spread = _dot(weights, [(each - mean_x) ** 2 for each in x])
    slope = _dot(weights, [(a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)]) / spread
    growth = max(0.0, slope)
    rests = [b - mean_y - growth * (a - mean_x) for a, b in zip(x, y, strict=True)]
    scatter = _dot(weights, [rest**2 for rest in rests]) / max(1, len(points) - 2)
    reach = math.log(steps) - mean_x
    noise = SIGMAS * math.sqrt(max(1.0, scatter) * (1 / total + reach**2 / spread))
    likely = mean_y + growth * reach
    slowed = likely - (1 - SLOWED) * growth * max(0.0, math.log(steps) - max(x))
    return Range(*(_length(value, ahead) for value in (slowed - noise, likely, likely + noise)))


def _log_odds(point: Point, ahead: int) -> tuple[float, float]:
    """logit s, and one over its variance, as if a draft were accepted as a whole or not at all:
    nothing between 0 and K with the same mean varies more."""
    least = 1 / (2 * point.drafts)  # half a draft, where none or all were accepted
    share = min(max((point.length - 1) / ahead, least), 1 - least)
    return math.log(share / (1 - share)), point.drafts * share * (1 - share)


def _length(log_odds: float, ahead: int) -> float:
    return 1 + ahead / (1 + math.exp(-log_odds))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(a, b, strict=True))
