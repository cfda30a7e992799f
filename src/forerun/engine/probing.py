"""Finding out whether it would pay to ask those who are not asked, in little of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engine.asking import Choice
from forerun.engine.ledger import Ledger
from forerun.engine.scheduler import Turn

PROBES = 0.005  # share of the time that may be spent on finding out whether drafts pay again
PROBE_STEPS = 2  # in the first of them a drafter catches up, which tells nothing about its rounds


@dataclass(slots=True)
class Probe:
    """A request that is asked in some way only to find out.

    steps: left of it. replaces: whether it would be asked otherwise, too. seconds, worth: of the
    draft that it would be asked for.
    first: seconds of its first round, behind so many `unread` tokens; 0: unknown.
    """

    request_id: int
    way: int
    steps: int = PROBE_STEPS
    replaces: bool = False
    seconds: float = 0.0
    worth: float = 0.0
    first: float = 0.0
    unread: int = 0


class Probes:
    """One after the other. None is begun in a way in which more was spent than they may take, or
    before what it takes to catch up was saved."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        self.probe: Probe | None = None  # that runs
        self._share = PROBES / len(ledgers)
        # Of each way by itself: a network's dear probe shall not keep counts from being found out.
        self._allowances = [0.0] * len(ledgers)  # seconds left for them
        self._needs: dict[int, float] = {}  # seconds to be saved, by ways that could be probed

    @property
    def due(self) -> bool:
        """Whether one could be begun."""
        return any(self._allowances[way] >= need for way, need in self._needs.items())

    def none(self) -> None:
        """Nobody can be asked, so that none could be begun."""
        self._needs = {}

    def choose(
        self, choice: Choice, turns: Sequence[Turn], able: Sequence[Sequence[int]], step: int
    ) -> int | None:
        """The place of the turn to be probed; begins a probe where none runs.

        able: per way, the places of those who can be asked.
        """
        ways = choice.ways
        others = [(way, i) for way, places in enumerate(able) for i in places if ways.get(i) != way]
        probe = self.probe
        if probe is None or probe.steps == 0 or not _at(probe, turns, others):
            self.probe = probe = self._begin(turns, others, step)
        if probe is None:
            return None
        probe.steps -= 1
        (i,) = _at(probe, turns, others)
        probe.replaces = i in ways
        probe.seconds = choice.shares.get(i, 0.0)
        probe.worth = choice.worths.get(i, 0.0) / choice.urgencies[i]
        return i

    def _begin(
        self, turns: Sequence[Turn], others: Sequence[tuple[int, int]], step: int
    ) -> Probe | None:
        """The next one, if there is somebody for whom enough was saved."""
        self._needs = {}
        ready = []
        for way, i in others:
            need = self._need(way, turns[i])
            self._needs[way] = min(need, self._needs.get(way, need))
            if self._allowances[way] >= need:
                ready.append((way, i))
        if not ready:
            return None
        way, i = min(ready, key=lambda each: self._waits(each[0], turns[each[1]], step))
        self._ledgers[way].probed_at = step
        return Probe(turns[i].request.id, way)

    def _need(self, way: int, turn: Turn) -> float:
        """Seconds that it takes to catch up with a request."""
        ledger, request = self._ledgers[way], turn.request
        if not ledger.reads:
            return 0.0
        return ledger.catch_up(len(request.tokens) - ledger.outlook(request).read)

    def of(self, way: int) -> Probe | None:
        """The probe that runs, if it is in this way."""
        return self.probe if self.probe and self.probe.way == way else None

    def asks(self, turn: Turn) -> bool:
        """Whether it is asked only to find out."""
        probe = self.of(turn.way)
        return probe is not None and probe.request_id == turn.request.id

    def replaces(self, turn: Turn) -> bool:
        """Whether it is asked to find out about another way than the one that it would be asked in:
        what becomes of such a draft says little about the others."""
        return self.asks(turn) and self.probe is not None and self.probe.replaces

    def earn(self, seconds: float) -> None:
        """A step took so long, of which a part is for probes. No more is saved up than the next of
        them needs: to be called behind `pay`."""
        for way, allowance in enumerate(self._allowances):
            saved = allowance + self._share * seconds
            self._allowances[way] = min(self._needs.get(way, 0.0), saved)

    def pay(self, turn: Turn, choice: Choice, requests: int, seconds: float, rows: float) -> None:
        """What was lost to find out: its drafting and rows or, where it took the place of a better
        draft, the difference, which is at least the drafting.

        seconds: of the round for so many `requests`, of which those count that it took longer than
        without this one. rows: seconds that the rows of its draft took.
        """
        probe = self.probe
        assert probe
        ledger, level = self._ledgers[probe.way], choice.level(probe.way)
        if requests > 1:
            seconds = max(0.0, seconds - ledger.rounds.seconds(requests - 1)[level])
        if probe.replaces:
            lost = (probe.worth - ledger.worths(turn.request)[level]) / choice.rate - probe.seconds
            self._allowances[probe.way] -= seconds + max(0.0, lost)
        else:
            self._allowances[probe.way] -= seconds + rows

    def _waits(self, way: int, turn: Turn, step: int) -> tuple[int, float, int]:
        """Ways are probed in turns, with who has waited longest; those who read, with who has least
        to catch up with."""
        ledger = self._ledgers[way]
        missed = ledger.begin(turn.request, step) if ledger.reads else 0.0
        return ledger.probed_at, missed, ledger.outlook(turn.request).asked_at


def _at(probe: Probe, turns: Sequence[Turn], places: Sequence[tuple[int, int]]) -> list[int]:
    """Where the request of a probe stands among ways and places; nowhere, if it is not there."""
    return [i for way, i in places if (way, turns[i].request.id) == (probe.way, probe.request_id)]
