"""For whom a drafter is asked, in which way and for how many nodes: all that raises tokens per
second, by what drafts were worth so far and how long rounds took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core import Request
from forerun.engine.ledger import Ledger
from forerun.engine.rounds import LEVELS

PROBE_LEVEL = LEVELS.index(4)


@dataclass(slots=True)
class Choice:
    """Who is asked, and how. All by the place of the request among the turns, but `levels`.

    levels: of the budgets, by way. tokens, seconds: that the pass is expected to bring and to take.
    worths: tokens of them that a request's draft brings. shares: seconds of them, of its round.
    urgencies: as many tokens each of a request's counts for.
    """

    tokens: float
    seconds: float
    urgencies: Sequence[float]
    ways: dict[int, int] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    worths: dict[int, float] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def level(self, way: int) -> int:
        """Of the budgets in a way; where it is only probed, as large as those of others."""
        return self.levels.get(way, max(self.levels.values(), default=PROBE_LEVEL))


def improve(
    choice: Choice, way: int, ledger: Ledger, requests: Mapping[int, Request], step: int
) -> None:
    """Ask those in this way with whom tokens per second are most.

    With the level l and the n requests that gain most by it, a pass brings W(n, l) tokens more,
    net of their rows and of what it takes to begin, and takes R(n, l) longer, less what drafts
    of theirs took so far.
    """
    shares, urgencies = choice.shares, choice.urgencies
    outlooks = [
        ([urgencies[i] * worth for worth in ledger.worths(each)], i) for i, each in requests.items()
    ]
    so_far = {
        i: choice.worths.get(i, 0.0) + choice.rate * ledger.begin(each, step)
        for i, each in requests.items()
    }
    rounds = [ledger.rounds.seconds(1 + count) for count in range(len(outlooks))]
    best, found, chosen = choice.rate, -1, 0
    for level in range(len(LEVELS)):
        tokens, seconds = choice.tokens, choice.seconds
        gains = [(worths[level] - so_far[i], i) for worths, i in outlooks]
        gains.sort(reverse=True)
        for count, (gain, i) in enumerate(gains):
            tokens += gain
            seconds -= shares.get(i, 0.0)
            rate = tokens / (seconds + rounds[count][level])
            if rate > best:
                best, found, chosen = rate, level, count + 1
    if not chosen:
        return
    gains = [(worths[found] - so_far[i], i) for worths, i in outlooks]
    gains.sort(reverse=True)
    choice.levels[way] = found
    for gain, i in gains[:chosen]:
        share = rounds[chosen - 1][found] / chosen
        choice.tokens += gain
        choice.seconds += share - shares.get(i, 0.0)
        choice.ways[i], shares[i] = way, share
        choice.worths[i] = choice.worths.get(i, 0.0) + gain
