"""How much to speculate: whom the drafter is asked for, and which nodes are worth a row.

Both questions have one answer, tokens per second. Before drafting it is taken from what earlier
drafts were worth and how long the drafter took (`outlook.py`, `rounds.py`), after drafting from the
survival of the nodes at hand. Decides about speed, never about text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core import Draft, Request
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs
from forerun.engine.outlook import MAX_NODES, Outlook, worths
from forerun.engine.rounds import LEVELS, Rounds
from forerun.engine.scheduler import NOTHING, Turn

PROBES = 0.01  # share of the time that may be spent on finding out whether drafts pay again
PROBE_STEPS = 2  # in the first of them a drafter catches up, which tells nothing about its rounds
PROBE_LEVEL = LEVELS.index(4)

# Where a drafter reads hidden states of the target, those of all tokens have to be kept for it.
UNASKED = 256  # tokens without a draft, after which a request goes on without
IDLE = 64  # steps without a draft that pays, after which it is off,
FOLLOWED = 4  # and one in so many new requests is followed, to find out whether it pays again


@dataclass(frozen=True, slots=True)
class Question:
    """What the drafter is asked in a step: level of the budgets, None for nothing.

    probes: ids of the asked requests that are only asked to find out.
    usual: whether the time of the round tells what rounds cost: nobody was asked for the first time
    or after a pause.
    """

    level: int | None = None
    asked: int = 0
    probes: frozenset[int] = frozenset()
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
        self._paid_at = 0  # the last step in which somebody was asked who was expected to pay
        self._price = 0.0  # tokens that a further row must bring, as of the last step
        self._row = 0.0  # seconds that it took
        self._allowance = 0.0  # seconds left for probes; none is begun while it is negative

    # ---- before drafting ------------------------------------------------------------------------

    def follows(self, request: Request) -> bool:
        """Whether a drafter that reads hidden states gets those of this request.

        What it once missed it cannot make up for: such a request goes on without drafts.
        """
        if not request.params.speculation.enabled:
            return False
        outlook = self._outlooks.get(request.id)
        if outlook is None:
            outlook = self._outlook(request)
            outlook.asked_length = len(request.tokens)
            is_off = self._step > self._paid_at + IDLE
            outlook.followed = not is_off or request.id % FOLLOWED == 0
        if outlook.followed and len(request.tokens) - outlook.asked_length > UNASKED:
            outlook.followed = False
        return outlook.followed

    def budgets(self, turns: Sequence[Turn], rows_left: int) -> list[int]:
        """How many nodes the drafter may propose for each of the decoding `turns`; 0: not asked.

        They fit into `rows_left` together. With the level l and the n requests of the best outlook
        a pass brings W(n, l) tokens beside the one of each, net of their rows, and takes R(n, l)
        longer; n and l maximise tokens per second.
        """
        limits = [_limit(turn.request) if turn.followed else 0 for turn in turns]
        able = [i for i, limit in enumerate(limits) if limit > 0]
        budgets = [0] * len(turns)
        self._question = Question()
        if not able or not rows_left:
            return budgets
        self._step += 1
        outlooks = [self._outlook(turns[i].request) for i in able]
        level, chosen = self._choose(outlooks, turns)
        asked = [*chosen, *self._probes(outlooks, chosen)][:rows_left]
        if not asked:
            return budgets
        probes = frozenset(turns[able[i]].request.id for i in asked[len(chosen) :])
        if level is None:
            level = PROBE_LEVEL
        else:
            self._paid_at = self._step
        usual = all(outlooks[i].asked_at == self._step - 1 for i in asked)
        self._question = Question(level, len(asked), probes, usual)
        for i in asked:
            outlooks[i].asked_at = self._step
            outlooks[i].asked_length = len(turns[able[i]].request.tokens)
            budgets[able[i]] = min(LEVELS[level], limits[able[i]], rows_left // len(asked))
        return budgets

    def _choose(
        self, outlooks: Sequence[Outlook], turns: Sequence[Turn]
    ) -> tuple[int | None, list[int]]:
        """Level and places of the requests with which tokens per second are most."""
        plain = self._plain(turns)
        best, found, chosen = len(turns) / plain, -1, 0
        rounds = [self.rounds.seconds(1 + count) for count in range(len(outlooks))]
        for level in range(len(LEVELS)):
            tokens = float(len(turns))
            worths = sorted([outlook.worths[level] for outlook in outlooks], reverse=True)
            for count, worth in enumerate(worths):
                tokens += worth
                rate = tokens / (plain + rounds[count][level])
                if rate > best:
                    best, found, chosen = rate, level, count + 1
        if not chosen:
            return None, []
        order = sorted(range(len(outlooks)), key=lambda i: -outlooks[i].worths[found])
        return found, order[:chosen]

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
        A drafter that keeps few of its promises is believed as little, but for probes: they have to
        show whether that is still so.
        A node never survives without its parent, so any n likeliest nodes are whole trees.
        Tokens drawn from a law (`probs_NV`) are all kept: to drop one because of its value would
        bias the output (Leviathan et al. 2023, and every rule that compares p with q).
        """
        drafts = [turn.draft for turn in turns]
        chances = [_chances(draft) for draft in drafts]
        if any(chances):
            trusted = [
                chances[i]
                if turn.request.id in self._question.probes
                else [self._all.honesty * chance for chance in chances[i]]
                for i, turn in enumerate(turns)
            ]
            drafts = self._buy(turns, trusted, rows, spent)
        self._expect(turns, chances)
        return drafts

    def _buy(
        self, turns: Sequence[Turn], chances: Sequence[list[float]], rows: int, spent: float
    ) -> list[Draft]:
        drafts = [turn.draft for turn in turns]
        drawn = [draft.probs_NV is not None for draft in drafts]
        rows += sum(len(draft) for draft, whole in zip(drafts, drawn, strict=True) if whole)
        tokens, seconds = float(len(turns)), self._plain(turns) + spent
        best, count = tokens / seconds, 0
        # What is less likely raises the rate at no place.
        least = best * self.costs.least(rows)
        nodes = sorted(
            (-chance, i, node)
            for i, whole in enumerate(drawn)
            if not whole
            for node, chance in enumerate(chances[i])
            if chance >= least
        )
        factor, curve = self.costs.factor, self.costs.curve(rows + len(nodes) + 1)
        keys = [self.costs.row_key * turn.request.cached for turn in turns]
        seconds -= factor * curve[rows]
        total = 0.0
        for n, (minus_chance, i, _) in enumerate(nodes, 1):
            tokens -= minus_chance
            total += keys[i]
            rate = tokens / (seconds + factor * (curve[rows + n] + total))
            if rate > best:
                best, count = rate, n
        row = curve[rows + count + 1] - curve[rows + count] + sum(keys) / len(keys)
        self._row = factor * row
        self._price = best * self._row
        kept: list[list[int]] = [[] for _ in drafts]
        for _, i, node in nodes[:count]:
            kept[i].append(node)
        return [
            draft if whole else prune(draft, part) if part else NOTHING
            for draft, whole, part in zip(drafts, drawn, kept, strict=True)
        ]

    def _expect(self, turns: Sequence[Turn], chances: Sequence[list[float]]) -> None:
        """Learn from what the drafts promise, of those who were asked for one."""
        for turn, survival in zip(turns, chances, strict=True):
            if not turn.budget:
                continue
            outlook = self._outlook(turn.request)
            # however modest a drafter was: a draft that goes on must not grow more certain
            trusted = [min(1.0, outlook.honesty * chance) for chance in survival]
            whole = turn.draft.probs_NV is not None
            worth = worths(trusted, turn.budget, whole, self._price)
            outlook.expect(worth)
            self._all.expect(worth)

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
            probes = [turn for turn in asked if turn.request.id in question.probes]
            nodes = sum(len(turn.draft) for turn in probes)
            self._allowance -= draft_seconds * len(probes) / question.asked + self._row * nodes
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

    def follows(self, request: Request) -> bool:
        return request.params.speculation.enabled

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
