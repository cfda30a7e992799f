"""What drafts of a request are expected to bring: learned from what they promise, and from how much
of their promises comes true.

The worth of a draft is what remains of the accepted tokens when its rows are paid for: the sum over
its nodes of survival - price, where `price` is the number of tokens that a row must bring, without
those below it, which are not bought. It is told for each level: for the draft cut to so many nodes.

Where many tokens were accepted, places were skipped at which a draft would have been as good. A
plan that drafts less would come to them. So a draft stands for as many passes of each level as the
tokens that it brings would take there; otherwise short drafts look worse than they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate

from forerun.core import Request
from forerun.engine.rounds import LEVELS

FIRST = [1 - 0.4**nodes for nodes in LEVELS]  # of a drafter never asked: worth trying out
PRIOR = 4  # drafts of its own for which a request counts what is known of all
WINDOW, LONG_WINDOW = 16, 64  # drafts remembered, of a request and of all
TRUST = 4.0  # promised tokens that are believed from the start,
OWN_TRUST = 32.0  # and those for which a request counts what is known of all
TRUST_WINDOW, LONG_TRUST_WINDOW = 128.0, 512.0  # promised tokens remembered
MAX_NODES = LEVELS[-1]


class Trust:
    """How many of the promised tokens were accepted, of one request or of all together.

    It is the same for all ways to ask: between them the luck of a few dozen drafts would decide.
    What is found out about all requests counts for each of them, also while nothing is bought for
    it.
    """

    __slots__ = ("_accepted", "_all", "_first", "_promised", "_window")

    def __init__(self, all_requests: Trust | None = None) -> None:
        self._promised = self._accepted = 0.0
        self._all = all_requests
        self._first = OWN_TRUST if all_requests else TRUST
        self._window = TRUST_WINDOW if all_requests else LONG_TRUST_WINDOW

    @property
    def honesty(self) -> float:
        """Accepted tokens for each that was promised."""
        return self.believe(self._all.honesty if self._all else 1.0)

    def believe(self, expected: float) -> float:
        """The same where so many are accepted of all requests together."""
        return (self._first * expected + self._accepted) / (self._first + self._promised)

    def settle(self, promised: float, accepted: int) -> None:
        """Learn from what became of the nodes that were verified."""
        if self._promised > self._window:
            self._promised *= 0.5
            self._accepted *= 0.5
            if not self._all:
                self._first *= 0.5  # what is never right shall not stay a little credible
        self._promised += promised
        self._accepted += accepted


class Trusts:
    """That in drafters, and that in drafts for each request."""

    def __init__(self) -> None:
        self._all = Trust()
        self._each: dict[int, Trust] = {}

    def believe(self, requests: Sequence[Request]) -> list[float]:
        """Accepted tokens for each that is promised to these requests."""
        honesty = self._all.honesty
        return [self._of(request).believe(honesty) for request in requests]

    def settle(self, request: Request, promised: float, accepted: int) -> None:
        """Learn from what became of the nodes that were verified."""
        self._all.settle(promised, accepted)
        self._of(request).settle(promised, accepted)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._each.pop(request.id, None)

    def _of(self, request: Request) -> Trust:
        found = self._each.get(request.id)
        if found is None:
            found = self._each[request.id] = Trust(self._all)
        return found


class Outlook:
    """What drafts are worth that are asked for in one way, of one request or of all together.

    first: what is expected at first, and counts as so many `passes`: worths, or the outlook of all,
    whatever becomes of that. `window` drafts are remembered. asked_at: the last step in which one
    was asked for. read: length of the request in tokens then.
    """

    __slots__ = (
        "_decay",
        "_first",
        "_first_passes",
        "_known",
        "_passes",
        "_worths",
        "asked_at",
        "read",
    )

    def __init__(self, first: Outlook | list[float], passes: int, window: int) -> None:
        self.asked_at, self.read = -1, 0
        self._first, self._first_passes = first, float(passes)
        self._decay = 1 - 1 / window
        self._known: list[float] | None = None  # as worked out last, of those who begin with worths
        self._worths = [0.0] * len(LEVELS)  # summed over
        self._passes = [0.0] * len(LEVELS)  # those for which the drafts stand

    @property
    def worths(self) -> list[float]:
        """Mean worth in a pass of a draft cut to so many nodes, at each level."""
        if self._known is None or isinstance(self._first, Outlook):
            self._known = self._work_out()
        return self._known

    def _work_out(self) -> list[float]:
        first = self._first.worths if isinstance(self._first, Outlook) else self._first
        count = self._first_passes
        return [
            (count * one + sum_of_worths) / (count + passes)
            for one, sum_of_worths, passes in zip(first, self._worths, self._passes, strict=True)
        ]

    def expect(self, worths: Sequence[float], passes: Sequence[float]) -> None:
        """Learn from what a draft promised, and for how many passes it stands (`appraise`)."""
        decay = self._decay
        self._known = None
        self._first_passes *= decay
        self._worths = [
            decay * sum_of_worths + each * worth
            for sum_of_worths, each, worth in zip(self._worths, passes, worths, strict=True)
        ]
        self._passes = [decay * old + each for old, each in zip(self._passes, passes, strict=True)]


def appraise(
    chances: Collection[float], size: int, budget: int, whole: bool, price: float
) -> tuple[list[float], list[float]]:
    """What a draft is worth at each level, and for how many passes of that level it stands.

    A draft as large as its budget would have gone on: as its survival decayed so far.
    chances: of its nodes to survive; those may be left out that are surely not worth `price`.
    size: nodes of the draft. whole: all of them must be bought.
    """
    ranked = sorted(chances if whole else [c for c in chances if c > price], reverse=True)
    count = len(ranked)
    sums = [0.0, *accumulate(ranked)]
    cut = LEVELS[: bisect_left(LEVELS, count)]  # levels that cut it
    worths = [sums[nodes] - price * nodes for nodes in cut]
    passes = [(1 + sums[-1]) / (1 + sums[nodes]) for nodes in cut]
    if not count == size >= budget:
        rest = len(LEVELS) - len(cut)
        return [*worths, *[sums[-1] - price * count] * rest], [*passes, *[1.0] * rest]
    tokens, before = sums[-1], size
    for nodes in LEVELS[len(cut) :]:
        if nodes > before:
            chance = ranked[-1] ** ((before + nodes + 1) / 2 / size)  # in the middle of those added
            if whole or chance > price:
                tokens += (nodes - before) * chance
                count += nodes - before
            before = nodes
        worths.append(tokens - price * count)
        passes.append((1 + sums[-1]) / (1 + tokens))
    return worths, passes
