"""What is known of one way to ask a drafter: what its rounds cost and what its drafts bring."""

from __future__ import annotations

from forerun.core import Request
from forerun.engine.outlook import Outlook
from forerun.engine.rounds import Rounds


class Ledger:
    """reads: whether this way needs hidden states of the target. all: outlook of all requests."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads
        self.rounds = Rounds()
        self.all = Outlook()
        self._outlooks: dict[int, Outlook] = {}

    def outlook(self, request: Request) -> Outlook:
        found = self._outlooks.get(request.id)
        if found is None:
            found = self._outlooks[request.id] = Outlook(self.all)
        return found

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._outlooks.pop(request.id, None)
