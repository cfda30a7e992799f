"""What a drafter's round costs, by the requests that it is for and the nodes that it may propose.

Nothing is known before it was asked: what it was never asked for is taken to be cheap, so that it
is tried once.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # budgets that a drafter is asked with
WINDOW = 32  # rounds at a level
MOST = 2.0  # times the estimate, as which a longer round counts, if the one before was not as long:
# something interrupted it
FIXED = 0.5  # share of a round that is the same for any number of requests, until it was seen
DOUBT = 0.25  # rounds' worth of evidence (relative variance of requests) that this guess weighs
OFTEN = 8  # rounds at a level, after which what it costs is worked out anew only now and then


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

    def predict(self, requests: int, usual: float) -> float:
        """usual: share of a round that grows with the requests, where this level says nothing."""
        products, squares = self.evidence
        share = (products + DOUBT * usual) / (squares + DOUBT)
        return self.seconds * (1 + min(1.0, max(0.0, share)) * (requests / self.requests - 1))


class Rounds:
    """Learns while the engine runs; works out what it is asked for when something is new."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in LEVELS]
        self._share = 1 - FIXED  # of a round that grows with the requests, at all levels
        self._known: dict[int, list[float]] = {}  # by requests

    def learn(self, level: int, requests: int, seconds: float) -> None:
        """A round took so long; level: index of its budget."""
        each = self._levels[level]
        if each.count:
            most = MOST * each.predict(requests, self._share)
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

    def seen(self, level: int) -> bool:
        """Whether any round was seen at this level."""
        return self._levels[level].count > 0

    def seconds(self, requests: int) -> list[float]:
        """Seconds of a round for so many requests, at each level."""
        known = self._known.get(requests)
        if known is None:
            known = self._known[requests] = self._work_out(requests)
        return known

    def _work_out(self, requests: int) -> list[float]:
        """Straight lines between the levels that are known, from nothing below the lowest of them;
        above the highest, as much as for that."""
        points = [(0, 0.0)]
        for nodes, level in zip(LEVELS, self._levels, strict=True):
            if level.count:
                points.append((nodes, level.predict(requests, self._share)))
        found = []
        right = 1
        for nodes in LEVELS:
            while right < len(points) and points[right][0] < nodes:
                right += 1
            if right == len(points):
                found.append(points[-1][1])
                continue
            (x0, y0), (x1, y1) = points[right - 1 : right + 1]
            found.append(y0 + (y1 - y0) * (nodes - x0) / (x1 - x0))
        return found
