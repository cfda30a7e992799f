"""What a verifier is: the only place that decides what the output will be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from forerun.core import Draft, Request, Verdict


class Verifier(ABC):
    """Walks each draft and says which nodes survive and which token follows."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    independent_noise: ClassVar[bool] = False  # drafts are sampled from their own noise, q kept

    @abstractmethod
    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        """One verdict per request.

        logits_NV: float32, request after request: the row that follows the last committed token,
        then one row per node of its draft.
        """
