"""What drafts of a request are expected to bring: learned from what they promise, and from how much
of their promises comes true.

The worth of a draft is what remains of the accepted tokens when its rows are paid for: the sum over
its nodes of survival - price, where `price` is the number of tokens that a row must bring, without
those below it, which are not bought. It is told for each level: for the draft cut to so many nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from forerun.engine.rounds import LEVELS

FIRST = [1 - 0.4**nodes for nodes in LEVELS]  # of a drafter never asked: worth trying out
PRIOR = 4  # drafts of its own for which a request counts what is known of all
WINDOW, LONG_WINDOW = 16, 64  # drafts remembered, of a request and of all
TRUST = 4.0  # promised tokens that are believed from the start
TRUST_WINDOW, LONG_TRUST_WINDOW = 64.0, 512.0  # promised tokens remembered
MAX_NODES = LEVELS[-1]


class Trust:
    """How many of the promised tokens were accepted, of one request or of all together.

    It is the same for all ways to ask: between them the luck of a few dozen drafts would decide.
    """

    __slots__ = ("_accepted", "_promised", "_window")

    def __init__(self, all_requests: Trust | None = None) -> None:
        self._promised = self._accepted = TRUST
        self._window = LONG_TRUST_WINDOW
        if all_requests:
            self._accepted *= all_requests.honesty
            self._window = TRUST_WINDOW

    @property
    def honesty(self) -> float:
        """Accepted tokens for each that was promised."""
        return self._accepted / self._promised

    def correct(self, survival: Sequence[float]) -> list[float]:
        """What is believed of it; nothing is likelier than certain."""
        honesty = self.honesty
        return [min(1.0, honesty * chance) for chance in survival]

    def settle(self, promised: float, accepted: int) -> None:
        """Learn from what became of the nodes that were verified."""
        if self._promised > self._window:
            self._promised *= 0.5
            self._accepted *= 0.5
        self._promised += promised
        self._accepted += accepted


class Outlook:
    """What drafts are worth that are asked for in one way, of one request or of all together.

    worths: mean worth of a draft cut to so many nodes; what is expected at first counts as so many
    `drafts`, and `window` are remembered. asked_at: the last step in which one was asked for.
    read: length of the request in tokens then.
    """

    __slots__ = ("_drafts", "_window", "asked_at", "read", "worths")

    def __init__(self, worths: list[float], drafts: int, window: int) -> None:
        self.worths = worths
        self.asked_at, self.read = -1, 0
        self._drafts, self._window = drafts, window

    def expect(self, worths: Sequence[float]) -> None:
        """Learn from what a draft promised."""
        self._drafts = min(self._drafts + 1, self._window)
        step = 1 / self._drafts
        self.worths = [
            old + step * (new - old) for old, new in zip(self.worths, worths, strict=True)
        ]


def worths(survival: Sequence[float], budget: int, whole: bool, price: float) -> list[float]:
    """What a draft is worth at each level.

    A draft as large as its budget would have gone on: as its survival decayed so far.
    whole: all its nodes must be bought.
    """
    ranked = sorted([c for c in survival if whole or c > price], reverse=True)
    sums = [0.0, *accumulate([chance - price for chance in ranked])]
    most, size = len(ranked), len(survival)
    found = [sums[min(nodes, most)] for nodes in LEVELS]
    if survival and size >= budget:
        last, before = min(survival), size
        for level, nodes in enumerate(LEVELS):
            if nodes > before:
                chance = last ** ((before + nodes + 1) / 2 / size)  # in the middle of those added
                gain = chance - price if whole or chance > price else 0.0
                found[level] = (found[level - 1] if level else 0.0) + (nodes - before) * gain
                before = nodes
    return found
