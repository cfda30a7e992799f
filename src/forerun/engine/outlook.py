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
from collections.abc import Collection
from itertools import accumulate

import numpy as np

from forerun.engine.rounds import LEVELS, Floats

FIRST = 1 - 0.4 ** np.array(LEVELS)  # of a drafter never asked: worth trying out
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


class Outlook:
    """What drafts of all requests together are worth.

    first_L: worths that are expected at first, which count as so many `passes`. `window` drafts are
    remembered. worths_L: mean worth in a pass of a draft cut to so many nodes, at each level.
    """

    def __init__(self, first_L: Floats, passes: int, window: int) -> None:
        self.worths_L = self._first_L = first_L
        self._first_passes, self._decay = float(passes), 1 - 1 / window
        self._sums_2L = np.zeros((2, len(LEVELS)))  # of worths in passes, and of these passes

    def expect(self, sums_R2L: Floats) -> None:
        """Learn from what drafts promised, one after the other: what they are worth in as many
        passes as they stand for, and these passes."""
        decay = self._decay ** len(sums_R2L)
        self._first_passes *= decay
        self._sums_2L *= decay
        if len(sums_R2L) == 1:
            self._sums_2L += sums_R2L[0]
        else:
            decay_R = self._decay ** np.arange(len(sums_R2L) - 1, -1, -1)
            self._sums_2L += np.tensordot(decay_R, sums_R2L, 1)
        worths_L, passes_L = self._sums_2L
        total_L = self._first_passes * self._first_L + worths_L
        self.worths_L = total_L / (self._first_passes + passes_L)


class Outlooks:
    """The same of each request, by the place that it is given. What is expected at first is what is
    known of all, whatever becomes of that."""

    def __init__(self, everybody: Outlook, passes: int, window: int) -> None:
        self._all = everybody
        self._first, self._decay = float(passes), 1 - 1 / window
        self._free: list[int] = []
        self._first_P1 = np.zeros((0, 1))  # passes for which the first guess counts
        self._sums_P2L = np.zeros((0, 2, len(LEVELS)))

    def open(self) -> int:
        """A place for a new request."""
        if not self._free:
            size = len(self._first_P1)
            more = max(8, size)
            self._free = list(range(size, size + more))[::-1]
            self._first_P1 = np.concatenate([self._first_P1, np.zeros((more, 1))])
            self._sums_P2L = np.concatenate([self._sums_P2L, np.zeros((more, 2, len(LEVELS)))])
        place = self._free.pop()
        self._first_P1[place], self._sums_P2L[place] = self._first, 0.0
        return place

    def close(self, place: int) -> None:
        """Its request has ended."""
        self._free.append(place)

    def worths(self, places: list[int]) -> Floats:
        """Mean worth in a pass, at each level, [requests, levels]."""
        at = _index(places)
        first_R1, sums_R2L = self._first_P1[at], self._sums_P2L[at]
        found_RL: Floats = first_R1 * self._all.worths_L
        found_RL += sums_R2L[:, 0]
        found_RL /= first_R1 + sums_R2L[:, 1]
        return found_RL

    def expect(self, places: list[int], sums_R2L: Floats) -> None:
        """Learn from what a draft of each of them promised, as `Outlook.expect` does."""
        at = _index(places)
        self._first_P1[at] *= self._decay
        self._sums_P2L[at] *= self._decay
        self._sums_P2L[at] += sums_R2L


def _index(places: list[int]) -> slice | list[int]:
    """The same places, as a slice where they follow each other: a view, not a copy."""
    first, end = places[0], places[0] + len(places)
    return slice(first, end) if places == list(range(first, end)) else places


def appraise(
    chances: Collection[float], size: int, budget: int, whole: bool, price: float
) -> list[float]:
    """What a draft is worth at each level, and then for how many passes of each level it stands.

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
        return [*worths, *[sums[-1] - price * count] * rest, *passes, *[1.0] * rest]
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
    return worths + passes
