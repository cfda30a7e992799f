"""How much to speculate: whom the drafter is asked for, and which nodes are worth a row of the pass.

Both questions have one answer, tokens per second. Before drafting it is taken from what earlier
drafts were worth and how long the drafter took (`outlook.py`, `rounds.py`), after drafting from the
survival of the nodes at hand. Decides about speed, never about text.

D requests that could draft, L levels (budgets), N nodes in order of survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from forerun.core import Draft, Request
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs, Floats
from forerun.engine.outlook import MAX_NODES, Outlook, worths
from forerun.engine.rounds import LEVELS, Rounds
from forerun.engine.scheduler import NOTHING, Turn

PROBES = 0.01  # share of the time that may be spent on finding out whether drafts pay again
PROBE_STEPS = 2  # in the first of them a drafter catches up, which tells nothing about its rounds
PROBE_LEVEL = LEVELS.index(4)


@dataclass(frozen=True, slots=True)
class Question:
    """What the drafter is asked in a step: level of the budgets, None for nothing.

    probes: how many of the asked requests are only asked to find out.
    usual: whether the time of the round tells what rounds cost: nobody was asked for the first time
    or after a pause.
    """

    level: int | None = None
    asked: int = 0
    probes: int = 0
    usual: bool = False


class Plan:
    """Speculates as much as raises tokens per second, which may be nothing. costs: of a pass."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.rounds = Rounds()
        self._all = Outlook()
        self._outlooks: dict[int, Outlook] = {}
        self._question = Question()
        self._step = 0
        self._price = 0.0  # tokens that a further row must bring, as of the last step
        self._allowance = 0.0  # seconds left for probes; none is begun while it is negative

    # ---- before drafting ------------------------------------------------------------------------

    def budgets(self, turns: Sequence[Turn], rows_left: int) -> list[int]:
        """How many nodes the drafter may propose for each of the decoding `turns`; 0: not asked.

        They fit into `rows_left` together. With the level l and the n requests of the best outlook
        a pass brings W(n, l) tokens beside the one of each, net of their rows, and takes R(n, l)
        longer; n and l maximise tokens per second.
        """
        self._step += 1
        limits = [_limit(turn.request) for turn in turns]
        able = [i for i, limit in enumerate(limits) if limit > 0]
        budgets = [0] * len(turns)
        self._question = Question()
        if not able or not rows_left:
            return budgets
        outlooks = [self._outlook(turns[i].request) for i in able]
        level, chosen = self._choose(outlooks, turns)
        probes = self._probes(outlooks, chosen)
        asked = [*chosen, *probes][:rows_left]
        if not asked:
            return budgets
        if level is None:
            level = PROBE_LEVEL
        usual = all(outlooks[i].asked_at == self._step - 1 for i in asked)
        self._question = Question(level, len(asked), len(probes), usual)
        for i in asked:
            outlooks[i].asked_at = self._step
            budgets[able[i]] = min(LEVELS[level], limits[able[i]], rows_left // len(asked))
        return budgets

    def _choose(
        self, outlooks: Sequence[Outlook], turns: Sequence[Turn]
    ) -> tuple[int | None, list[int]]:
        """Level and places of the requests with which tokens per second are most."""
        plain = self._plain(turns)
        worth_DL = np.array([outlook.worths_L for outlook in outlooks])
        order_DL = np.argsort(-worth_DL, axis=0)
        gains_DL = np.take_along_axis(worth_DL, order_DL, 0).cumsum(0)
        rounds_DL = self.rounds.seconds(len(outlooks))[: len(outlooks)]
        rates_DL = (len(turns) + gains_DL) / (plain + rounds_DL)
        last, level = divmod(int(rates_DL.argmax()), len(LEVELS))
        if rates_DL[last, level] <= len(turns) / plain:
            return None, []
        return level, order_DL[: last + 1, level].tolist()

    def _probes(self, outlooks: Sequence[Outlook], chosen: Sequence[int]) -> list[int]:
        """Who else is asked, for nothing but to find out whether it pays."""
        rest = set(range(len(outlooks))).difference(chosen)
        for i in chosen:
            outlooks[i].probes = 0
        if rest and self._allowance >= 0 and not any(outlooks[i].probes for i in rest):
            longest = min(rest, key=lambda i: outlooks[i].asked_at)
            outlooks[longest].probes = PROBE_STEPS
        probes = [i for i in rest if outlooks[i].probes]
        for i in probes:
            outlooks[i].probes -= 1
        return probes

    def _plain(self, turns: Sequence[Turn]) -> float:
        """Seconds of a pass over the last tokens of these alone: what prompts take in the same pass
        is spent anyway."""
        return self.costs.seconds([turn.request.cached for turn in turns], [1] * len(turns))

    # ---- after drafting -------------------------------------------------------------------------

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        """The parts of the drafts that are worth their rows; `rows` others are in the pass anyway.

        turns: all that decide; each brings a token anyway. spent: seconds of drafting.
        With the n likeliest nodes a pass brings E(n) tokens in T(n) seconds; n maximises E / T.
        A node never survives without its parent, so any n likeliest nodes are whole trees.
        Tokens drawn from a law (`probs_NV`) are all kept: to drop one because of its value would
        bias the output (Leviathan et al. 2023, and every rule that compares p with q).
        """
        drafts = [turn.draft for turn in turns]
        chances = [_chances(draft) for draft in drafts]
        if any(chances):
            drafts = self._buy(turns, chances, rows, spent)
        self._expect(turns, chances)
        return drafts

    def _buy(
        self, turns: Sequence[Turn], chances: Sequence[list[float]], rows: int, spent: float
    ) -> list[Draft]:
        drafts = [turn.draft for turn in turns]
        drawn = [draft.probs_NV is not None for draft in drafts]
        sizes = [len(draft) for draft in drafts]
        survival_N = np.fromiter(chain.from_iterable(chances), float)
        prefix_N = np.repeat([turn.request.cached for turn in turns], sizes)
        free_N = np.flatnonzero(~np.repeat(drawn, sizes))
        order_N = free_N[np.argsort(-survival_N[free_N], kind="stable")]
        rows += len(survival_N) - len(order_N)

        tokens = len(turns) + np.cumsum([0.0, *survival_N[order_N]])
        end = rows + len(order_N) + 2  # one row more than there are nodes: what it would cost
        curve_R = self.costs.curve(end)[rows:end]
        keys_R = np.cumsum([0, *prefix_N[order_N], prefix_N.mean()])
        longer_R = curve_R - curve_R[0] + self.costs.factor * self.costs.row_key * keys_R
        seconds = self._plain(turns) + spent + longer_R
        rates = tokens / seconds[:-1]
        count = int(rates.argmax())
        self._price = float(rates[count] * (seconds[count + 1] - seconds[count]))
        if count == len(order_N):
            return drafts
        kept_N = np.repeat(drawn, sizes)
        kept_N[order_N[:count]] = True
        return [
            _part(draft, part_N)
            for draft, part_N in zip(drafts, np.split(kept_N, np.cumsum(sizes)[:-1]), strict=True)
        ]

    def _expect(self, turns: Sequence[Turn], chances: Sequence[list[float]]) -> None:
        """Learn from what the drafts promise, of those who were asked for one."""
        asked = [i for i, turn in enumerate(turns) if turn.budget]
        outlooks = [self._outlook(turns[i].request) for i in asked]
        worth_DL = worths(
            [chances[i] for i in asked],
            [turns[i].budget for i in asked],
            [turns[i].draft.probs_NV is not None for i in asked],
            [outlook.honesty for outlook in outlooks],
            self._price,
        )
        for outlook, worth_L in zip(outlooks, worth_DL, strict=True):
            outlook.expect(worth_L)
            self._all.expect(worth_L)

    def predict(self, turns: Sequence[Turn]) -> float:
        """Seconds that a step takes beside drafting; 0 where it reads prompts, too."""
        if not all(turn.decoding for turn in turns):
            return 0.0
        return self.costs.seconds(
            [turn.request.cached for turn in turns], [1 + len(turn.draft) for turn in turns]
        )

    # ---- after the step -------------------------------------------------------------------------

    def learn(
        self, asked: Sequence[Turn], draft_seconds: float, step_seconds: float, predicted: float
    ) -> None:
        """Compare with what was expected. predicted: what `predict` said of the step."""
        if predicted:
            self.costs.correct(predicted, step_seconds - draft_seconds)
        for turn in asked:
            if turn.draft:
                assert turn.verdict
                promised, accepted = sum(turn.draft.survival), len(turn.verdict.path)
                self._all.settle(promised, accepted)
                self._outlook(turn.request).settle(promised, accepted)
        question = self._question
        if question.usual and question.level is not None:
            self.rounds.learn(question.level, question.asked, draft_seconds)
        self._allowance += PROBES * step_seconds
        if question.probes:
            nodes = sum(len(turn.draft) for turn in asked)
            passed = self.costs[len(asked) + nodes] - self.costs[len(asked)]
            self._allowance -= (draft_seconds + passed) * question.probes / question.asked
        self._allowance = min(0.0, self._allowance)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._outlooks.pop(request.id, None)

    def _outlook(self, request: Request) -> Outlook:
        outlook = self._outlooks.get(request.id)
        if outlook is None:
            outlook = self._outlooks[request.id] = Outlook(self._all)
        return outlook


class Static(Plan):
    """Checks every node that a drafter's own settings propose, in every pass, whatever it costs.

    For papers and comparisons: a chain of k or a tree of n nodes is then just that.
    """

    def __init__(self) -> None:
        super().__init__(Costs({1: 1.0}))

    def budgets(self, turns: Sequence[Turn], rows_left: int) -> list[int]:
        share = rows_left // max(1, len(turns))
        return [min(share, _limit(turn.request)) for turn in turns]

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        return [turn.draft for turn in turns]

    def predict(self, turns: Sequence[Turn]) -> float:
        return 0.0

    def learn(
        self, asked: Sequence[Turn], draft_seconds: float, step_seconds: float, predicted: float
    ) -> None:
        """Nothing: every request is asked for in every step."""


def _limit(request: Request) -> int:
    """Most nodes that may be drafted: the pass brings one token beside the accepted ones."""
    wanted = request.params.speculation
    if not wanted.enabled:
        return 0
    return max(0, min(MAX_NODES, wanted.max_draft_tokens or MAX_NODES, request.remaining - 1))


def _chances(draft: Draft) -> list[float]:
    """Survival per node, no larger than the parent's even where a drafter rounds badly."""
    chances: list[float] = []
    for parent, chance in zip(draft.parents, draft.survival, strict=True):
        chances.append(chance if parent < 0 else min(chance, chances[parent]))
    return chances


def _part(draft: Draft, kept_N: NDArray[np.bool_]) -> Draft:
    nodes = np.flatnonzero(kept_N).tolist()
    return prune(draft, nodes) if nodes else NOTHING
