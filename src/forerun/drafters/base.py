"""What a drafter is, and the registry of those that exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from forerun.core import Draft, Request, Verdict


class Drafter(ABC):
    """Proposes what could follow. Guesses may be arbitrarily bad; they cost speed, never text.

    State per request is the drafter's own, keyed by `request.id`; `request.tokens` is the truth,
    and a drafter that was not asked for a while catches up from it.
    """

    name: ClassVar[str]  # as in a draft spec
    makes_trees: ClassVar[bool] = False
    samples: ClassVar[bool] = False  # can draw from a law of its own, so that `rejection` applies
    taps: Sequence[int] = ()  # layer boundaries of the target that `observe` needs

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft of at most `budget` nodes per request, in order; empty where it has nothing.

        A request's tokens all lie in the store except the last one.
        """

    def observe(  # noqa: B027, most drafters need not know
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        """Learn what became of the proposals, after the tokens were committed.

        taps: per request, the hidden states of its newly cached rows, [rows, T, hidden]; empty
        when the drafter declares no taps.
        """

    def release(self, request: Request) -> None:  # noqa: B027, most keep no state
        """The request has ended (or was put back in the queue): forget its state."""
