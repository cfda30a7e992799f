"""`a+b`: one tree of what several sources believe, whoever it is that names a token.

At every node each source is asked for its law. A token that several name is one candidate; its
chance is mixed from their beliefs (`mixing.py`), and the likeliest paths make the tree.

Where the target samples, each source has weighed its law with the target's noise already. In a
mixture of logarithms that is the mixed law, coupled once, by a weight that is learned with the
others: w1 (log q1 + c1 noise) + w2 (log q2 + c2 noise).

Sources that run no network take next to no time and are always asked. Whether one of the networks,
all or none are asked besides is for the plan to say, by what rounds take and what drafts bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.combined import Combined
from forerun.drafters.joining import JoinedRounds
from forerun.drafters.laws import SILENT, Law
from forerun.drafters.mixing import NAMED, OTHERS, Mixer, Weights, score
from forerun.drafters.sources import Source
from forerun.drafters.tree import best_first

NEGLIGIBLE = 0.01  # a path that no source takes to be likelier is not looked at

NOTHING = -1  # stands for all tokens that no source names


# What may follow: its share of the place's total, what that was mixed from, who says what of it.
Candidate: TypeAlias = tuple[float, Weights, Sequence[float], int]


class Place:
    """A node of a growing tree, with what the sources know there; the root is one, too.

    reached: the chance to get here. total: of the candidates' shares, those of NOTHING included.
    behind: the places that the tree was grown to, by token.
    """

    __slots__ = ("behind", "candidates", "depth", "reached", "states", "total")

    def __init__(self, states: Sequence[object], depth: int, reached: float) -> None:
        self.states, self.depth, self.reached = states, depth, reached
        self.candidates: dict[int, Candidate] = {}
        self.total = 0.0
        self.behind: dict[int, Place] = {}


class Joined(Combined):
    """Asks all its drafters for their laws, and grows one tree from them.

    Every candidate that stood behind right tokens teaches the weights, whether a row was bought for
    it or not. What error is left, and how foreseeable a request is, the calibration learns.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.makes_trees = True
        # Where the target samples, sources are right in other ways than where it is greedy.
        self._mixers = {greedy: Mixer(len(drafters)) for greedy in (True, False)}
        self._names = _Names(drafters)
        self._calibration = Calibration()
        self._open: dict[int, tuple[int, Place]] = {}
        # Without compiled code each node costs as much Python as a small network's pass.
        compiled = all(drafter.has_sources for drafter in drafters)
        self._rounds = (
            JoinedRounds.make(len(drafters), NEGLIGIBLE, self._names) if compiled else None
        )
        self._ways = [Some(self, members) for members in _subsets(drafters)]

    @property
    def ways(self) -> Sequence[Some]:
        return self._ways

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return self.ask(range(len(self.drafters)), requests, budgets)

    def ask(
        self, members: Sequence[int], requests: Sequence[Request], budgets: Sequence[int]
    ) -> list[Draft]:
        """One tree per request of what some of the drafters believe; the others are not asked."""
        if len(members) == 1:  # which has nobody to be joined with
            return self.drafters[members[0]].propose(requests, budgets)
        if self._rounds:
            return self._in_one_call(self._rounds, members, requests, budgets)
        silent = [SILENT] * len(requests)
        each = [
            drafter.laws(requests, budgets) if source in members else silent
            for source, drafter in enumerate(self.drafters)
        ]
        laws = zip(*each, strict=True)
        return [self._join(*each) for each in zip(requests, budgets, laws, strict=True)]

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request in requests:
            if self._rounds:
                self._rounds.learn(request)
            else:
                self._learn(request)
            self._calibration.settle(request)
        super().observe(requests, verdicts, taps)

    def release(self, request: Request) -> None:
        if self._rounds:
            self._rounds.release(request)
        self._open.pop(request.id, None)
        self._calibration.forget(request)
        super().release(request)

    def _in_one_call(
        self,
        rounds: JoinedRounds,
        members: Sequence[int],
        requests: Sequence[Request],
        budgets: Sequence[int],
    ) -> list[Draft]:
        silent = [Source()] * len(requests)
        each = [
            drafter.sources(requests, budgets) if source in members else silent
            for source, drafter in enumerate(self.drafters)
        ]
        of_requests = list(zip(*each, strict=True))
        return rounds.propose(requests, budgets, of_requests, self._calibration)

    def _join(self, request: Request, budget: int, laws: Sequence[Law]) -> Draft:
        nodes = min(budget, sum(law.nodes for law in laws))
        depth = min(request.remaining - 1, max(law.depth for law in laws))
        if nodes <= 0 or depth <= 0:
            return Draft()
        root = Place([law.root for law in laws], 0, 1.0)
        self._open[request.id] = len(request.tokens), root
        draft = best_first(
            root,
            partial(_candidates, laws, self._mixers[request.params.greedy]),
            partial(_advance, laws),
            nodes=nodes,
            depth=depth,
            floor=min(law.floor for law in laws if law.nodes),
            ends=request.stop_ids,
        )
        honest = self._calibration.correct(request, draft, 0.0)
        return replace(honest, sources=self._sources(draft, root))

    def _sources(self, draft: Draft, root: Place) -> list[str]:
        """Who named each node."""
        places = {-1: root}
        names = []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            place = places[parent]
            names.append(self._names[place.candidates[token][-1]])
            if token in place.behind:
                places[node] = place.behind[token]
        return names

    def _learn(self, request: Request) -> None:
        """Follow what was committed since the last tree as far as it was asked about."""
        length, place = self._open.pop(request.id, (0, None))
        for truth in request.tokens[length:]:
            if place is None:
                return
            found = truth if truth in place.candidates else NOTHING
            for token, (share, weights, inputs, _) in place.candidates.items():
                weights.learn(inputs, share / place.total, token == found)
            place = place.behind.get(truth)


class _Names(dict[int, str]):
    """Those who name a token, as a draft spec would put it, by the pattern of who says what."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__()
        self._drafters = drafters

    def __missing__(self, pattern: int) -> str:
        names = [
            drafter.name
            for source, drafter in enumerate(self._drafters)
            if pattern // 3**source % 3 == NAMED
        ]
        self[pattern] = found = "+".join(names)
        return found


class Some:
    """Some of the drafters of a joined one, by their places."""

    def __init__(self, joined: Joined, members: Sequence[int]) -> None:
        self._joined, self.members = joined, members
        self.name = "+".join(joined.drafters[member].name for member in members)
        self.taps = sorted({tap for member in members for tap in joined.drafters[member].taps})

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return self._joined.ask(self.members, requests, budgets)


def _subsets(drafters: Sequence[Drafter]) -> list[list[int]]:
    """Who can be asked together: all that run no network, with one of the networks besides or with
    all of them, which comes last."""
    free = [i for i, drafter in enumerate(drafters) if not drafter.runs_network]
    networks = [i for i, drafter in enumerate(drafters) if drafter.runs_network]
    subsets = [free, *(sorted([*free, network]) for network in networks)]
    everyone = list(range(len(drafters)))
    return [each for each in subsets if each and each != everyone] + [everyone]


def _candidates(laws: Sequence[Law], mixer: Mixer, place: Place) -> Iterable[tuple[int, float]]:
    """The tokens that may follow at a place, each with its chance; together less than 1."""
    depth, reached = place.depth, place.reached
    if reached < NEGLIGIBLE:
        return ()
    least = NEGLIGIBLE / reached
    beliefs: list[dict[int, float]] = []
    left: list[float] = []  # what each source says of tokens that it does not name
    speaking = 0
    tokens: dict[int, None] = {}
    for source, (law, state) in enumerate(zip(laws, place.states, strict=True)):
        asked = depth < law.depth and reached >= law.floor
        named = dict(law.successors(state)) if asked else {}
        beliefs.append(named)
        if not named:
            left.append(0.0)
            continue
        left.append(score(1 - sum(named.values())))
        speaking += OTHERS * 3**source
        for token, belief in named.items():
            if belief >= least:
                tokens[token] = None
    if not tokens:
        return ()
    left.append(1.0)  # the input of the bias
    found = place.candidates
    weights = mixer[speaking]
    total = weights.raw(left)
    found[NOTHING] = total, weights, left, speaking
    for token in tokens:
        inputs = left.copy()
        pattern = speaking
        for source, named in enumerate(beliefs):
            if token in named:
                inputs[source] = score(named[token])
                pattern += (NAMED - OTHERS) * 3**source
        weights = mixer[pattern]
        share = weights.raw(inputs)
        found[token] = share, weights, inputs, pattern
        total += share
    place.total = total
    return [(token, found[token][0] / total) for token in tokens]


def _advance(laws: Sequence[Law], place: Place, token: int) -> Place:
    """The place behind one of its candidates."""
    states = [law.advance(state, token) for law, state in zip(laws, place.states, strict=True)]
    reached = place.reached * place.candidates[token][0] / place.total
    place.behind[token] = behind = Place(states, place.depth + 1, reached)
    return behind
