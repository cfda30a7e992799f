"""What a drafter's round costs, by the requests that it is for and the nodes that it may propose.

Nothing is known before it was asked: what it was never asked for is taken to be cheap, so that it
is tried once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # budgets that a drafter is asked with
WINDOW = 32  # rounds at a level
MOST = 2.0  # times the estimate, as which a longer round counts, if the one before was not as long:
# something interrupted it
FIXED = 0.5  # share of a round that is the same for any number of requests, until it was seen
DOUBT = 0.25  # rounds' worth of evidence (relative variance of requests) that this guess weighs
OFTEN = 8  # rounds at a level, after which what it costs is worked out anew only now and then

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Level:
    """Seconds = fixed + each * requests, from the running means and covariance of both."""

    count: int = 0
    requests: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    interrupted: bool = False  # the last round, as it seemed

    def learn(self, requests: int, seconds: float) -> None:
        self.count += 1
        step = 1 / min(self.count, WINDOW)
        more, longer = requests - self.requests, seconds - self.seconds
        self.requests += step * more
        self.seconds += step * longer
        self.variance = (1 - step) * (self.variance + step * more * more)
        self.covariance = (1 - step) * (self.covariance + step * more * longer)

    @property
    def evidence(self) -> tuple[float, float]:
        """By how much rounds took longer for more requests, both relative to their means: the
        sums of products and of squares. It grows with the rounds seen, the doubt does not."""
        rounds, per_request = min(self.count, WINDOW), self.requests * self.seconds
        return (
            rounds * self.covariance / per_request if per_request else 0.0,
            rounds * self.variance / self.requests**2,
        )

    def line(self, usual: float) -> tuple[float, float]:
        """Seconds of a round for no request, and those for each.

        usual: share of a round that grows with the requests, where this level says nothing.
        """
        products, squares = self.evidence
        share = min(1.0, max(0.0, (products + DOUBT * usual) / (squares + DOUBT)))
        return (1 - share) * self.seconds, share * self.seconds / self.requests


class Rounds:
    """Learns while the engine runs; works out what it is asked for when something is new."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in LEVELS]
        self._share = 1 - FIXED  # of a round that grows with the requests, at all levels
        self._known: dict[int, Floats] = {}  # by requests

    def learn(self, level: int, requests: int, seconds: float) -> None:
        """A round took so long; level: index of its budget."""
        each = self._levels[level]
        if each.count:
            fixed, further = each.line(self._share)
            most = MOST * (fixed + further * requests)
            seemed_so, each.interrupted = each.interrupted, seconds > most
            if each.interrupted and not seemed_so:
                seconds = most
        each.learn(requests, seconds)
        if each.count < OFTEN or each.count % OFTEN == 0:
            self._known.clear()
            evidence = [level.evidence for level in self._levels if level.count]
            products = sum(product for product, _ in evidence) + DOUBT * (1 - FIXED)
            self._share = products / (sum(square for _, square in evidence) + DOUBT)

    @property
    def known(self) -> bool:
        """Whether any round was seen."""
        return any(level.count for level in self._levels)

    def seconds(self, requests: int) -> list[float]:
        """Seconds of a round for so many requests, at each level."""
        seconds: list[float] = self.table(requests)[:, -1].tolist()
        return seconds

    def table(self, requests: int) -> Floats:
        """Seconds of rounds at each level for 1, 2, ... requests, [levels, requests]."""
        known = self._known.get(requests)
        if known is None:
            known = self._known[requests] = self._work_out(requests)
        return known

    def _work_out(self, requests: int) -> Floats:
        """Straight lines between the levels that are known, from nothing below the lowest of them;
        above the highest, as much as for that."""
        known = [
            (nodes, level) for nodes, level in zip(LEVELS, self._levels, strict=True) if level.count
        ]
        places = [0, *(nodes for nodes, _ in known)]
        lines = [(0.0, 0.0), *(level.line(self._share) for _, level in known)]
        fixed_L, each_L = (np.interp(LEVELS, places, line) for line in zip(*lines, strict=True))
        table_LR: Floats = fixed_L[:, None] + each_L[:, None] * np.arange(1, requests + 1)
        return table_LR
