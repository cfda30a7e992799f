"""For whom a drafter is asked, in which way and for how many nodes: all that raises tokens per
second, by what drafts were worth so far and how long rounds took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.core import Request
from forerun.engine.ledger import Ledger
from forerun.engine.rounds import LEVELS, Floats

PROBE_LEVEL = LEVELS.index(4)


@dataclass(slots=True)
class Choice:
    """Who is asked, and how. All by the place of the request among the turns, but `levels`.

    levels: of the budgets, by way. tokens, seconds: that the pass is expected to bring and to take.
    worths: tokens of them that a request's draft brings. shares: seconds of them, of its round.
    """

    tokens: float
    seconds: float
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
    places, shares = list(requests), choice.shares
    count, rate = len(places), choice.rate
    so_far = [
        choice.worths.get(i, 0.0) + rate * ledger.begin(each, step) for i, each in requests.items()
    ]
    gains_LR = ledger.worths(list(requests.values())).T - so_far
    tokens_LR = np.sort(gains_LR, axis=1)[:, ::-1]  # the largest gain first
    tokens_LR[:, 0] += choice.tokens
    rounds_LR = ledger.rounds.table(count)
    seconds_LR = rounds_LR + choice.seconds
    if shares:
        shares_R = np.array([shares.get(i, 0.0) for i in places])
        seconds_LR -= shares_R[_order(gains_LR)].cumsum(axis=1)
    rates_LR = tokens_LR.cumsum(axis=1) / seconds_LR
    level, last = divmod(int(rates_LR.argmax()), count)
    if rates_LR[level, last] <= rate:
        return
    choice.levels[way] = level
    share = float(rounds_LR[level, last]) / (last + 1)
    gains = gains_LR[level].tolist()
    for r in _order(gains_LR[level])[: last + 1].tolist():
        i, gain = places[r], gains[r]
        choice.tokens += gain
        choice.seconds += share - shares.get(i, 0.0)
        choice.ways[i], shares[i] = way, share
        choice.worths[i] = choice.worths.get(i, 0.0) + gain


def _order(gains: Floats) -> npt.NDArray[np.intp]:
    """The largest gain first, along the last axis; of those that are as large, the last."""
    return gains.argsort(axis=-1, kind="stable")[..., ::-1]
