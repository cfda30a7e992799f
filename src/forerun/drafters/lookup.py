"""Drafters that look up what may follow, one request at a time, without a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration


class Lookup(Drafter):
    """Proposes for each request by itself; what becomes of it is learned by one calibration."""

    def __init__(self, options: Settings, context: DraftContext) -> None:
        super().__init__(options, context)
        self._calibration = Calibration()

    @abstractmethod
    def _propose(self, request: Request, budget: int) -> Draft:
        """See `Drafter.propose`; made by `_calibration`."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(*each) for each in zip(requests, budgets, strict=True)]

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request in requests:
            self._calibration.settle(request)

    def release(self, request: Request) -> None:
        self._calibration.forget(request)
