"""What is known of one way to ask a drafter: what its rounds cost and what its drafts bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core import Request
from forerun.engine.outlook import FIRST, LONG_WINDOW, PRIOR, WINDOW, Outlook, Outlooks
from forerun.engine.rounds import Floats, Rounds

STEADY = 4  # times as many drafts tell by how much one way is better than another,
ALIKE = 8  # and what is known of all requests counts for so many times as many
CATCH_UPS = 8  # remembered
STAY = 32  # steps for which a draft that reads hidden states is taken to be asked from then on


@dataclass(slots=True)
class Standing:
    """Of one request. place: among the outlooks. asked_at: the last step in which a draft was asked
    for. read: its length in tokens then."""

    place: int
    asked_at: int = -1
    read: int = 0


class Ledger:
    """reads: whether this way needs hidden states of the target.

    base: another way. By how much this one is better differs less from text to text than what
    either is worth, so that this is what is learned, and new requests begin with.
    """

    def __init__(self, reads: bool, base: Ledger | None = None) -> None:
        self.reads = reads
        self.rounds = Rounds()
        self._base = base
        steady, alike = (STEADY, ALIKE) if base else (1, 1)
        first = np.zeros_like(FIRST) if base else FIRST
        self.all = Outlook(first, ALIKE * PRIOR if base else 1, steady * LONG_WINDOW)
        self._outlooks = Outlooks(self.all, alike * PRIOR, steady * WINDOW)
        self._standings: dict[int, Standing] = {}  # by request
        self.probed_at = -1  # the last step in which it was asked for only to find out
        self.catch_ups = 0  # seen
        self._catch_up = 0.0  # seconds for each token

    @property
    def tried(self) -> bool:
        """Whether it may be asked in earnest: beside another way a probe shows first what a round
        takes, as those for all requests at once would be dear."""
        return self._base is None or self.rounds.known

    def standing(self, request: Request) -> Standing:
        """When it was asked."""
        found = self._standings.get(request.id)
        if found is None:
            found = self._standings[request.id] = Standing(self._outlooks.open())
        return found

    def worths(self, requests: Sequence[Request]) -> Floats:
        """What a draft of each is expected to be worth, at each level, [requests, levels]."""
        worths_RL = self._outlooks.worths([self.standing(each).place for each in requests])
        return self._base.worths(requests) + worths_RL if self._base else worths_RL

    def expect(self, requests: Sequence[Request], outlooks_R2L: Floats) -> None:
        """Learn from what drafts promised: their worths, and for how many passes they stand
        (`appraise`)."""
        worths_RL, passes_RL = outlooks_R2L[:, 0], outlooks_R2L[:, 1]
        if self._base:
            worths_RL -= self._base.worths(requests)
        worths_RL *= passes_RL
        places = [self.standing(each).place for each in requests]
        self._outlooks.expect(places, outlooks_R2L)
        self.all.expect(outlooks_R2L)

    def catch_up(self, tokens: int) -> float:
        """Seconds that a round takes longer behind so many tokens that it has not read."""
        return self._catch_up * tokens

    def begin(self, request: Request, step: int) -> float:
        """Seconds that it takes in each of the next steps until what was missed is made up for."""
        standing = self.standing(request)
        if standing.asked_at == step - 1:
            return 0.0
        return self.catch_up(len(request.tokens) - standing.read) / STAY

    def learn_catch_up(self, tokens: int, seconds: float) -> None:
        """A round took so much longer than usual behind so many tokens."""
        self.catch_ups = min(self.catch_ups + 1, CATCH_UPS)
        self._catch_up += (max(0.0, seconds) / max(1, tokens) - self._catch_up) / self.catch_ups

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if standing := self._standings.pop(request.id, None):
            self._outlooks.close(standing.place)
