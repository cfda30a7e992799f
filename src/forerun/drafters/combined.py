"""`a+b` where drafts must be drawn from their own noise: the second is asked where the first has
nothing to say. Elsewhere both are joined into one tree (`joined.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import Drafter


class Combined(Drafter):
    """Asks its drafters in order, each for the requests that are still without a draft."""

    name = "combined"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.makes_trees = any(drafter.makes_trees for drafter in drafters)
        self.samples = any(drafter.samples for drafter in drafters)
        self.runs_network = any(drafter.runs_network for drafter in drafters)
        self.taps = sorted({tap for drafter in drafters for tap in drafter.taps})

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft()] * len(requests)
        for drafter in self.drafters:
            open_ = [index for index, draft in enumerate(drafts) if not draft.tokens]
            if not open_:
                break
            proposed = drafter.propose([requests[i] for i in open_], [budgets[i] for i in open_])
            for index, draft in zip(open_, proposed, strict=True):
                drafts[index] = replace(draft, sources=[drafter.name] * len(draft))
        return drafts

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        followed = [i for i, each in enumerate(taps) if len(each)]
        for drafter in self.drafters:
            if not drafter.taps:
                drafter.observe(requests, verdicts, ())
            elif followed:
                drafter.observe(
                    [requests[i] for i in followed],
                    [verdicts[i] for i in followed],
                    self._wanted(drafter, [taps[i] for i in followed]),
                )

    def _wanted(self, drafter: Drafter, taps: Sequence[Tensor]) -> Sequence[Tensor]:
        """The part of the hidden states that one of them reads; a part is a copy."""
        if list(drafter.taps) == list(self.taps):
            return taps
        wanted = [list(self.taps).index(tap) for tap in drafter.taps]
        return [each_RTD[:, wanted] for each_RTD in taps]

    def unfollow(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.unfollow(request)

    def release(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.release(request)
