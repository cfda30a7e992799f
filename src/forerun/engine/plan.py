"""How much to speculate: whom the drafter is asked for, and which nodes are worth a row.

Both questions have one answer, tokens per second. Before drafting it is taken from what earlier
drafts were worth and how long the drafter took (`outlook.py`, `rounds.py`), after drafting from the
survival of the nodes at hand. Decides about speed, never about text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core import Draft, Request
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs
from forerun.engine.ledger import Ledger
from forerun.engine.outlook import MAX_NODES, Outlook, Trust, appraise
from forerun.engine.rounds import LEVELS
from forerun.engine.scheduler import NOTHING, Turn

PROBES = 0.01  # share of the time that may be spent on finding out whether drafts pay again
PROBE_STEPS = 2  # in the first of them a drafter catches up, which tells nothing about its rounds
PROBE_LEVEL = LEVELS.index(4)

FEW = 4  # one newcomer in so many requests makes a round no longer than it usually is

# Where a drafter reads hidden states of the target, those of all tokens have to be kept for it, and
# one that was not asked for a while reads them all when it is.
STAY = 32  # steps for which such a draft is taken to be asked from then on
UNASKED = 64  # tokens without such a draft that pays, after which a request goes on without
RECENT = 32  # steps, of which such drafts must have paid
SELDOM = 0.1  # in this share at least, or they are off,
FOLLOWED = 16  # and one in so many new requests is followed, to find out whether they pay again


@dataclass(slots=True)
class Standing:
    """Of one request. followed: whether its hidden states are kept.

    paid: its length in tokens when somebody who reads them was last asked because that pays.
    """

    trust: Trust
    followed: bool
    paid: int


@dataclass(slots=True)
class Probe:
    """A request that is asked in some way only to find out.

    steps: left of it. seconds, worth: of the draft that it would be asked for otherwise.
    """

    request_id: int
    way: int
    steps: int = PROBE_STEPS
    seconds: float = 0.0
    worth: float = 0.0
    began: float = 0.0
    unread: int = 0


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


class Plan:
    """Speculates as much as raises tokens per second, which may be nothing.

    costs: of a pass. reads: per way in which the drafter can be asked, whether it needs hidden
    states of the target.
    """

    def __init__(self, costs: Costs, reads: Sequence[bool] = (True,)) -> None:
        self.costs = costs
        first = Ledger(reads[0])
        self._ledgers = [first, *(Ledger(each, first) for each in reads[1:])]
        self._trust = Trust()
        self._standings: dict[int, Standing] = {}
        self._choice = Choice(0.0, 1.0)
        self._usual: set[int] = set()  # ways whose rounds take as long as they usually do
        self._probe: Probe | None = None
        self._unread: dict[int, int] = {}  # tokens to catch up with in this step, by way
        self._step = 0
        self._reading = 1.0  # share of the last steps in which those who read were found to pay
        self._price = 0.0  # tokens that a further row must bring, as of the last step
        self._row = 0.0  # seconds that it took
        self._allowance = 0.0  # seconds left for probes; none is begun while it is negative

    # ---- before drafting ------------------------------------------------------------------------

    def follows(self, request: Request) -> bool:
        """Whether a drafter that reads hidden states gets those of this request.

        What it once missed it cannot make up for: such a request goes on without its drafts.
        """
        if not request.params.speculation.enabled:
            return False
        standing = self._standing(request)
        if standing.followed:
            standing.followed = len(request.tokens) - standing.paid <= UNASKED and (
                not self._is_off or request.id % FOLLOWED == 0
            )
        return standing.followed

    @property
    def _is_off(self) -> bool:
        """Whether those who read pay so seldom that hardly anybody is followed for them."""
        return self._reading < SELDOM

    def budgets(self, turns: Sequence[Turn], rows_left: int) -> list[int]:
        """How many nodes the drafter may propose for each of the decoding `turns`; 0: not asked.

        They fit into `rows_left` together. Sets the way in which each of them is asked.
        """
        limits = [_limit(turn.request) for turn in turns]
        able = [
            [i for i, turn in enumerate(turns) if limits[i] and (turn.followed or not ledger.reads)]
            for ledger in self._ledgers
        ]
        budgets = [0] * len(turns)
        self._usual = set()
        if not any(able) or not rows_left:
            return budgets
        self._step += 1
        self._choice = choice = Choice(float(len(turns)), self._plain(turns))
        for way, places in enumerate(able):
            self._improve(choice, way, {i: turns[i].request for i in places})
        self._look_back(
            [turns[i] for i, way in choice.ways.items() if self._ledgers[way].reads], able
        )
        asked = dict(choice.ways)
        if (probed := self._find_out(turns, able)) is not None:
            assert self._probe
            asked[probed] = self._probe.way
        places = list(asked)[:rows_left]
        for i in places:
            turns[i].way = way = asked[i]
            nodes = LEVELS[choice.level(way)]
            budgets[i] = min(nodes, limits[i], rows_left // len(places))
        self._note([turns[i] for i in places])
        return budgets

    def _look_back(self, reading: Sequence[Turn], able: Sequence[Sequence[int]]) -> None:
        """Remember for whom it pays to ask those who read, and whether there are any."""
        for turn in reading:
            self._standing(turn.request).paid = len(turn.request.tokens)
        if any(places for ledger, places in zip(self._ledgers, able, strict=True) if ledger.reads):
            self._reading += (bool(reading) - self._reading) / RECENT

    def _improve(self, choice: Choice, way: int, requests: Mapping[int, Request]) -> None:
        """Ask those in this way with whom tokens per second are most.

        With the level l and the n requests that gain most by it, a pass brings W(n, l) tokens more,
        net of their rows and of what it takes to begin, and takes R(n, l) longer, less what drafts
        of theirs took so far.
        """
        ledger, shares = self._ledgers[way], choice.shares
        outlooks = [(ledger.worths(each), i) for i, each in requests.items()]
        so_far = {
            i: choice.worths.get(i, 0.0) + choice.rate * self._begin(way, each)
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

    def _begin(self, way: int, request: Request) -> float:
        """Seconds that it takes in each of the next steps until what was missed is made up for."""
        ledger = self._ledgers[way]
        outlook = ledger.outlook(request)
        if outlook.asked_at == self._step - 1:
            return 0.0
        return ledger.catch_up(len(request.tokens) - outlook.read) / STAY

    def _find_out(self, turns: Sequence[Turn], able: Sequence[Sequence[int]]) -> int | None:
        """Whose turn it is to be asked in the way of the probe; begins one where none runs."""
        ways = self._choice.ways
        others = [(way, i) for way, places in enumerate(able) for i in places if ways.get(i) != way]
        probe = self._probe
        if probe is None or probe.steps == 0 or not _at(probe, turns, others):
            self._probe = probe = None
            if others and self._allowance >= 0:
                way, i = min(others, key=lambda each: self._waits(each[0], turns[each[1]]))
                self._probe = probe = Probe(turns[i].request.id, way)
                self._ledgers[way].probed_at = self._step
        if probe is None:
            return None
        probe.steps -= 1
        (i,) = _at(probe, turns, others)
        probe.seconds = self._choice.shares.get(i, 0.0)
        probe.worth = self._choice.worths.get(i, 0.0)
        return i

    def _waits(self, way: int, turn: Turn) -> tuple[int, float, int]:
        """Ways are probed in turns, with who has waited longest; those who read, with who has least
        to catch up with."""
        ledger = self._ledgers[way]
        missed = self._begin(way, turn.request) if ledger.reads else 0.0
        return ledger.probed_at, missed, ledger.outlook(turn.request).asked_at

    def _note(self, asked: Sequence[Turn]) -> None:
        """Those who are asked now, what they have to catch up with, and whether what it takes tells
        what rounds cost: few of them are asked for the first time or after a pause."""
        newcomers: Counter[int] = Counter()
        self._unread = {}
        for turn in asked:
            way, length = turn.way, len(turn.request.tokens)
            outlook = self._outlook(turn, way)
            if outlook.asked_at != self._step - 1:
                newcomers[way] += 1
                self._unread[way] = self._unread.get(way, 0) + length - outlook.read
            outlook.asked_at, outlook.read = self._step, length
        ways = Counter(turn.way for turn in asked)
        self._usual = {way for way, count in ways.items() if FEW * newcomers[way] <= count}

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
                survival
                if self._probes(turn)
                else self._standing(turn.request).trust.correct(survival)
                for turn, survival in zip(turns, chances, strict=True)
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
            trusted = self._standing(turn.request).trust.correct(survival)
            whole = turn.draft.probs_NV is not None
            worths, passes = appraise(trusted, turn.budget, whole, self._price)
            self._ledgers[turn.way].expect(turn.request, worths, passes)

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
                self._trust.settle(promised, accepted)
                self._standing(turn.request).trust.settle(promised, accepted)
        self._allowance += PROBES * step_seconds
        told = sum(turn.drafting for turn in asked)
        for way in {turn.way for turn in asked}:
            group = [turn for turn in asked if turn.way == way]
            # What it takes to learn from the step is drafting, too.
            part = sum(turn.drafting for turn in group) / told if told else len(group) / len(asked)
            self._learn_round(way, len(group), part * draft_seconds)
            for turn in group:
                if self._probes(turn):
                    self._allowance -= self._price_of_probe(turn, len(group), part * draft_seconds)
        self._allowance = min(0.0, self._allowance)

    def _learn_round(self, way: int, requests: int, seconds: float) -> None:
        """What a probe takes longer in its first step than in its second is catching up."""
        ledger, level = self._ledgers[way], self._choice.level(way)
        probe = self._probe if self._probe and self._probe.way == way else None
        if way in self._usual:
            ledger.rounds.learn(level, requests, seconds)
            if probe and probe.began:
                ledger.learn_catch_up(probe.unread, probe.began - seconds)
                probe.began = 0.0
        elif probe:
            probe.began, probe.unread = seconds, self._unread[way]
        elif ledger.catch_ups:
            seconds -= ledger.catch_up(self._unread[way])
            if seconds > 0:
                ledger.rounds.learn(level, requests, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for ledger in self._ledgers:
            ledger.forget(request)
        self._standings.pop(request.id, None)

    def _price_of_probe(self, turn: Turn, requests: int, seconds: float) -> float:
        """Seconds that were lost to find out: its drafting and rows or, where it took the place of
        a better draft, the difference, which is at least the drafting.

        seconds: of the round, of which those count that it took longer than without this request.
        """
        probe, choice = self._probe, self._choice
        assert probe
        if requests > 1:
            without = self._ledgers[probe.way].rounds.seconds(requests - 1)
            seconds = max(0.0, seconds - without[choice.level(probe.way)])
        if not probe.seconds:
            return seconds + self._row * len(turn.draft)
        worth = self._ledgers[probe.way].worths(turn.request)[choice.level(probe.way)]
        return seconds + max(0.0, (probe.worth - worth) / choice.rate - probe.seconds)

    def _probes(self, turn: Turn) -> bool:
        """Whether it is asked only to find out."""
        probe = self._probe
        return probe is not None and (probe.request_id, probe.way) == (turn.request.id, turn.way)

    def _standing(self, request: Request) -> Standing:
        found = self._standings.get(request.id)
        if found is None:
            followed = not self._is_off or request.id % FOLLOWED == 0
            found = Standing(Trust(self._trust), followed, len(request.tokens))
            self._standings[request.id] = found
        return found

    def _outlook(self, turn: Turn, way: int) -> Outlook:
        return self._ledgers[way].outlook(turn.request)


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


def _at(probe: Probe, turns: Sequence[Turn], places: Sequence[tuple[int, int]]) -> list[int]:
    """Where the request of a probe stands among ways and places; nowhere, if it is not there."""
    return [i for way, i in places if (way, turns[i].request.id) == (probe.way, probe.request_id)]


def _chances(draft: Draft) -> list[float]:
    """Survival per node, no larger than the parent's even where a drafter rounds badly."""
    chances: list[float] = []
    for parent, chance in zip(draft.parents, draft.survival, strict=True):
        chances.append(chance if parent < 0 else min(chance, chances[parent]))
    return chances
