"""What is known of one way to ask a drafter: what its rounds cost and what its drafts bring."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import Request
from forerun.engine.outlook import FIRST, LONG_WINDOW, PRIOR, WINDOW, Outlook
from forerun.engine.rounds import Rounds

STEADY = 4  # times as many drafts tell by how much one way is better than another,
ALIKE = 8  # and what is known of all requests counts for so many times as many
CATCH_UPS = 8  # remembered
STAY = 32  # steps for which a draft that reads hidden states is taken to be asked from then on


class Ledger:
    """reads: whether this way needs hidden states of the target.

    base: another way. By how much this one is better differs less from text to text than what
    either is worth, so that this is what is learned, and new requests begin with.
    """

    def __init__(self, reads: bool, base: Ledger | None = None) -> None:
        self.reads = reads
        self.rounds = Rounds()
        self._base = base
        self._steady, self._alike = (STEADY, ALIKE) if base else (1, 1)
        first = [0.0] * len(FIRST) if base else FIRST
        self.all = Outlook(first, ALIKE * PRIOR if base else 1, self._steady * LONG_WINDOW)
        self._outlooks: dict[int, Outlook] = {}
        self.probed_at = -1  # the last step in which it was asked for only to find out
        self.catch_ups = 0  # seen
        self._catch_up = 0.0  # seconds for each token

    @property
    def tried(self) -> bool:
        """Whether it may be asked in earnest: beside another way a probe shows first what a round
        takes, as those for all requests at once would be dear."""
        return self._base is None or self.rounds.known

    def outlook(self, request: Request) -> Outlook:
        """Of drafts of a request or, with a base, of what they are worth beyond the base's."""
        found = self._outlooks.get(request.id)
        if found is None:
            found = Outlook(self.all, self._alike * PRIOR, self._steady * WINDOW)
            self._outlooks[request.id] = found
        return found

    def worths(self, request: Request) -> list[float]:
        """What a draft is expected to be worth, at each level."""
        worths = self.outlook(request).worths
        if not self._base:
            return worths
        return [low + more for low, more in zip(self._base.worths(request), worths, strict=True)]

    def expect(self, request: Request, worths: Sequence[float], passes: Sequence[float]) -> None:
        """Learn from what a draft promised, and for how many passes it stands."""
        if self._base:
            base = self._base.worths(request)
            worths = [each - low for each, low in zip(worths, base, strict=True)]
        self.outlook(request).expect(worths, passes)
        self.all.expect(worths, passes)

    def catch_up(self, tokens: int) -> float:
        """Seconds that a round takes longer behind so many tokens that it has not read."""
        return self._catch_up * tokens

    def begin(self, request: Request, step: int) -> float:
        """Seconds that it takes in each of the next steps until what was missed is made up for."""
        outlook = self.outlook(request)
        if outlook.asked_at == step - 1:
            return 0.0
        return self.catch_up(len(request.tokens) - outlook.read) / STAY

    def learn_catch_up(self, tokens: int, seconds: float) -> None:
        """A round took so much longer than usual behind so many tokens."""
        self.catch_ups = min(self.catch_ups + 1, CATCH_UPS)
        self._catch_up += (max(0.0, seconds) / max(1, tokens) - self._catch_up) / self.catch_ups

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._outlooks.pop(request.id, None)
