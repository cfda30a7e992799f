"""For whom the hidden states of the target are kept.

Where a drafter reads them, those of all tokens have to be kept for it, and one that was not asked
for a while reads them all when it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.core import Request

UNASKED = 64  # tokens without such a draft that pays, after which a request goes on without
RECENT = 32  # steps, of which such drafts must have paid
FIRST = 4  # steps, for which it counts at first that they pay
SELDOM = 0.1  # in this share at least, or they are off,
FOLLOWED = 16  # and one in so many new requests is followed, to find out whether they pay again


@dataclass(slots=True)
class Standing:
    """Of one request. followed: whether its hidden states are kept.

    paid: its length in tokens when somebody who reads them was last asked because that pays.
    """

    followed: bool
    paid: int


class Following:
    """Learns whether those who read hidden states pay, and for whom."""

    def __init__(self) -> None:
        self._standings: dict[int, Standing] = {}
        self._steps = FIRST
        self._reading = 1.0  # share of the last steps in which those who read were found to pay

    def follows(self, request: Request) -> bool:
        """Whether a drafter that reads hidden states gets those of this request.

        What it once missed it cannot make up for: such a request goes on without its drafts.
        """
        standing = self._standing(request)
        if standing.followed:
            standing.followed = len(request.tokens) - standing.paid <= UNASKED and self._may(
                request
            )
        return standing.followed

    def learn(self, paying: Iterable[Request]) -> None:
        """In a step in which those who read could be asked, it paid for these."""
        any_paid = False
        for request in paying:
            self._standing(request).paid = len(request.tokens)
            any_paid = True
        self._steps = min(RECENT, self._steps + 1)
        self._reading += (any_paid - self._reading) / self._steps

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._standings.pop(request.id, None)

    def _may(self, request: Request) -> bool:
        """Where those who read pay seldom, hardly anybody is followed for them."""
        return self._reading >= SELDOM or request.id % FOLLOWED == 0

    def _standing(self, request: Request) -> Standing:
        found = self._standings.get(request.id)
        if found is None:
            found = Standing(self._may(request), len(request.tokens))
            self._standings[request.id] = found
        return found
