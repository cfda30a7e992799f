"""How much to speculate: whom the drafter is asked for, and which nodes are worth a row.

Both questions have one answer, tokens per second. Before drafting it is taken from what earlier
drafts were worth and how long the drafter took (`asking.py`), after drafting from the survival of
the nodes at hand (`buying.py`). Decides about speed, never about text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.core import Draft, Request
from forerun.engine.asking import Choice, improve
from forerun.engine.buying import buy, likely
from forerun.engine.costs import Costs
from forerun.engine.following import Following
from forerun.engine.ledger import Ledger
from forerun.engine.outlook import MAX_NODES, Trusts, appraise
from forerun.engine.probing import Probes
from forerun.engine.rounds import LEVELS
from forerun.engine.scheduler import Took, Turn
from forerun.engine.urgency import urgencies

HOLD = 3  # steps for which it stands who is asked for how much, where it is known what that takes
REST = 8  # steps for which it stands that nobody is asked
ENOUGH = 8  # promises to be learned from between two decisions
FEW = 4  # one newcomer in so many requests makes a round no longer than it usually is


@dataclass(slots=True)
class _Decision:
    """Who is asked, and for how many nodes, for as long as the requests are the same.

    requests: their ids, and whether their hidden states are kept. ways: by place, of those who are
    asked. paying: places of those for whom it pays to ask drafters that read hidden states; None
    where that was no question. steps: for which it still stands. rests: whether nothing is to be
    learned in these.
    """

    requests: list[tuple[int, bool]]
    budgets: list[int]
    ways: dict[int, int]
    paying: list[int] | None = None
    steps: int = 0
    rests: bool = False


class _Promise(NamedTuple):
    """A draft as it was proposed. chances: of the nodes that may be worth a row. whole: all of them
    must be bought. urgency: as many tokens each of them counts for."""

    turn: Turn
    chances: dict[int, float]
    nodes: int
    whole: bool
    urgency: float


class _Lesson(NamedTuple):
    """A step, to be learned from. usual: ways whose rounds took as long as they usually do. unread:
    tokens that were caught up with, by way. price: tokens that a further row had to bring."""

    asked: Sequence[Turn]
    took: Took
    usual: set[int]
    unread: dict[int, int]
    promises: list[_Promise]
    price: float


class Plan:
    """Speculates as much as raises tokens per second, which may be nothing.

    costs: of a pass. reads: per way in which the drafter can be asked, whether it needs hidden
    states of the target.
    """

    def __init__(self, costs: Costs, reads: Sequence[bool] = (True,)) -> None:
        self.costs = costs
        first = Ledger(reads[0])
        self._ledgers = [first, *(Ledger(each, first) for each in reads[1:])]
        self._probes = Probes(self._ledgers)
        self._following = Following()
        self._trusts = Trusts()
        self._choice = Choice(0.0, 1.0, [])
        self._urgencies: dict[int, float] = {}  # by request; 1 where there is none
        self._step = 0
        self._decision = _Decision([], [], {})
        self._lessons: list[_Lesson] = []
        # Of this step, as lessons have them; the price is that of the last one with drafts.
        self._usual: set[int] = set()
        self._unread: dict[int, int] = {}
        self._promises: list[_Promise] = []
        self._price = 0.0

    # ---- before drafting ------------------------------------------------------------------------

    def follows(self, request: Request) -> bool:
        """Whether a drafter that reads hidden states gets those of this request."""
        return request.params.speculation.enabled and self._following.follows(request)

    def rests(self, turns: Sequence[Turn]) -> bool:
        """Whether nobody is asked, as it was in the step before, and that stands. Of such a step
        nothing more is said than that it is over (`rested`): behind a pass, which moves all weights
        through the processor's caches, every function that takes part takes long."""
        decision = self._decision
        if not decision.rests:
            return False
        requests = [(turn.request.id, turn.followed) for turn in turns]
        if not self._stands(requests, turns, rows_left=0):
            return False
        self._step += 1
        if decision.paying is not None:
            self._following.learn(())
        return True

    def rested(self, seconds: float) -> None:
        """Such a step took so long."""
        self._probes.earn(seconds)

    def budgets(self, turns: Sequence[Turn], rows_left: int, crowded: bool = False) -> list[int]:
        """How many nodes the drafter may propose for each of the decoding `turns`; 0: not asked.

        They fit into `rows_left` together. Sets the way in which each of them is asked. crowded:
        somebody waits for the place of whoever ends next.
        """
        requests = [(turn.request.id, turn.followed) for turn in turns]
        stands = self._stands(requests, turns, rows_left)
        self._step += 1
        if not stands:
            self._catch_up()
            self._decision = self._decide(requests, turns, rows_left, crowded)
        decision = self._decision
        for i, way in decision.ways.items():
            turns[i].way = way
        self._note([turns[i] for i in decision.ways])
        if decision.paying is not None:
            self._following.learn([turns[i].request for i in decision.paying])
        return decision.budgets

    def _stands(
        self, requests: list[tuple[int, bool]], turns: Sequence[Turn], rows_left: int
    ) -> bool:
        """Whether what was decided goes on for one step more: to think takes time, and while nobody
        is asked nothing is learned that would change anything."""
        decision = self._decision
        if not decision.steps or decision.requests != requests or self._probes.due:
            return False
        decision.steps -= 1
        budgets = decision.budgets
        return sum(budgets) <= rows_left and all(
            budgets[i] <= most_nodes(turns[i].request) for i in decision.ways
        )

    def _decide(
        self,
        requests: list[tuple[int, bool]],
        turns: Sequence[Turn],
        rows_left: int,
        crowded: bool,
    ) -> _Decision:
        limits = [most_nodes(turn.request) for turn in turns]
        able = [
            [i for i, turn in enumerate(turns) if limits[i] and (turn.followed or not ledger.reads)]
            for ledger in self._ledgers
        ]
        decision = _Decision(requests, [0] * len(turns), {})
        if not any(able) or not rows_left:
            self._probes.none()
            decision.steps, decision.rests = REST, True
            return decision
        asking = [turn.request for turn in turns]
        self._urgencies = {} if crowded else urgencies(asking, self.costs)
        self._choice = choice = Choice(
            float(len(turns)),
            self.costs.plain([request.cached for request in asking]),
            [self._urgencies.get(request.id, 1.0) for request in asking],
        )
        for way, places in enumerate(able):
            if places and self._ledgers[way].tried:
                asked = {i: turns[i].request for i in places}
                improve(choice, way, self._ledgers[way], asked, self._step)
        decision.paying = self._paying(choice.ways, able)
        ways = dict(choice.ways)
        if (probed := self._probes.choose(choice, turns, able, self._step)) is not None:
            assert self._probes.probe
            ways[probed] = self._probes.probe.way
        places = list(ways)[:rows_left]
        usual = probed is None  # a decision like those to come
        for i in places:
            decision.ways[i] = way = ways[i]
            level = choice.level(way)
            nodes = min(LEVELS[level], limits[i], rows_left // len(places))
            decision.budgets[i] = nodes
            usual = usual and nodes == LEVELS[level] and self._ledgers[way].rounds.seen(level)
        decision.rests = not places
        decision.steps = REST if decision.rests else HOLD if usual else 0
        return decision

    def _paying(self, ways: dict[int, int], able: Sequence[Sequence[int]]) -> list[int] | None:
        """For whom it pays to ask those who read, where any of them can be asked."""
        reads = [ledger.reads for ledger in self._ledgers]
        if not any(each.reads and each.tried and able[i] for i, each in enumerate(self._ledgers)):
            return None
        return [i for i, way in ways.items() if reads[way]]

    def _note(self, asked: Sequence[Turn]) -> None:
        """Those who are asked now, what they have to catch up with, and whether what it takes tells
        what rounds cost: few of them are asked for the first time or after a pause."""
        newcomers: list[int] = []  # their ways
        self._unread = {}
        for turn in asked:
            way, length = turn.way, len(turn.request.tokens)
            outlook = self._ledgers[way].outlook(turn.request)
            if outlook.asked_at != self._step - 1:
                newcomers.append(way)
                self._unread[way] = self._unread.get(way, 0) + length - outlook.read
            outlook.asked_at, outlook.read = self._step, length
        ways = [turn.way for turn in asked]
        self._usual = {way for way in set(ways) if FEW * newcomers.count(way) <= ways.count(way)}

    # ---- after drafting -------------------------------------------------------------------------

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        """The parts of the drafts that are worth their rows; `rows` others are in the pass anyway.

        turns: all that decide; each brings a token anyway. spent: seconds of drafting.
        A drafter that keeps few of its promises is believed as little, but for probes: they have to
        show whether that is still so.
        """
        drafts = [turn.draft for turn in turns]
        trusts = self._trusts.believe([turn.request for turn in turns])
        probed = None
        if self._probes.probe:
            probed = next((i for i, turn in enumerate(turns) if self._probes.asks(turn)), None)
        chances: list[dict[int, float]] = [{}] * len(turns)
        kept = drafts
        urgent = [self._urgencies.get(turn.request.id, 1.0) for turn in turns]
        if any(drafts):
            taken = [1.0 if i == probed else trust for i, trust in enumerate(trusts)]
            kept, self._price, chances = buy(self.costs, turns, taken, urgent, rows, spent)
        if probed is not None:
            chances[probed] = likely(turns[probed].draft, trusts[probed], 0.0)
        self._promises = [
            _Promise(turn, found, len(draft), draft.probs_NV is not None, urgency)
            for turn, draft, found, urgency in zip(turns, drafts, chances, urgent, strict=True)
            if turn.budget
        ]
        return kept

    def predict(self, turns: Sequence[Turn]) -> float:
        """Seconds that a step takes beside drafting and this plan; 0: nothing is said of one that
        reads prompts, too."""
        if not all(turn.decoding for turn in turns):
            return 0.0
        rows = [1 + len(turn.draft) for turn in turns]
        return self.costs.seconds([turn.request.cached for turn in turns], rows)

    # ---- after the step -------------------------------------------------------------------------

    def learn(self, asked: Sequence[Turn], took: Took) -> None:
        """Compare with what was expected, as soon as something is to be decided.

        What comes behind a pass finds nothing in the processor's caches, so that one lesson takes
        as long as several.
        """
        promises, self._promises = self._promises, []
        each = _Lesson(asked, took, self._usual, self._unread, promises, self._price)
        self._lessons.append(each)
        if len(self._lessons) > REST:
            self._catch_up()

    def _catch_up(self) -> None:
        """Learn from the steps since the last decision; what drafts promise, from as many of the
        last steps as tell `ENOUGH`."""
        lessons, self._lessons = self._lessons, []
        first, promises = len(lessons), 0
        while first and promises < ENOUGH:
            first -= 1
            promises += len(lessons[first].promises)
        for each in lessons[first:]:
            for promise in each.promises:
                self._look_forward(promise, each.price)
        for each in lessons:
            self._look_back(each)

    def _look_forward(self, promise: _Promise, price: float) -> None:
        """Learn from what a draft promised, as far as it was trusted."""
        turn, chances, nodes, whole, urgency = promise
        worths, passes = appraise(chances.values(), nodes, turn.budget, whole, price / urgency)
        self._ledgers[turn.way].expect(turn.request, worths, passes)

    def _look_back(self, lesson: _Lesson) -> None:
        """Learn from what became of it."""
        asked, took = lesson.asked, lesson.took
        if took.predicted:
            self.costs.correct(took.rows, took.predicted, took.seconds - took.speculating)
        for turn in asked:
            if turn.draft and not self._probes.replaces(turn):
                assert turn.verdict
                promised, accepted = sum(turn.draft.survival), len(turn.verdict.path)
                self._trusts.settle(turn.request, promised, accepted)
        told = sum(turn.drafting for turn in asked)
        for way in {turn.way for turn in asked}:
            group = [turn for turn in asked if turn.way == way]
            # What it takes to learn from the step is drafting, too.
            part = sum(turn.drafting for turn in group) / told if told else len(group) / len(asked)
            self._learn_round(lesson, way, len(group), part * took.speculating)
            for turn in group:
                if self._probes.asks(turn):
                    seconds = part * took.speculating
                    cached, nodes = turn.request.cached, len(turn.draft)
                    rows_took = self.costs.further(took.rows, cached, nodes)
                    self._probes.pay(turn, self._choice, len(group), seconds, rows_took)
        self._probes.earn(took.seconds)

    def _learn_round(self, lesson: _Lesson, way: int, requests: int, seconds: float) -> None:
        """What a probe takes longer in its first step than in its second is catching up."""
        ledger, level, probe = self._ledgers[way], self._choice.level(way), self._probes.of(way)
        if way in lesson.usual:
            if probe and probe.first:
                if ledger.rounds.known:  # else much was done in it that is done only once
                    ledger.learn_catch_up(probe.unread, probe.first - seconds)
                probe.first = 0.0
            ledger.rounds.learn(level, requests, seconds)
        elif probe:
            probe.first, probe.unread = seconds, lesson.unread[way]
        elif ledger.catch_ups:
            seconds -= ledger.catch_up(lesson.unread[way])
            if seconds > 0:
                ledger.rounds.learn(level, requests, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._catch_up()
        for ledger in self._ledgers:
            ledger.forget(request)
        self._following.forget(request)
        self._trusts.forget(request)


def most_nodes(request: Request) -> int:
    """That may be drafted: the pass brings one token beside the accepted ones."""
    wanted = request.params.speculation
    if not wanted.enabled:
        return 0
    return max(0, min(MAX_NODES, wanted.max_draft_tokens or MAX_NODES, request.remaining - 1))
