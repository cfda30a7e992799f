"""What training did to a model: held-out texts under the model as it was and as it is.

N predictions: those of supervised tokens; C hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from forerun.models.target import OpenTarget
from forerun.train.capture import Capture
from forerun.train.examples import Example

PIECE = 64  # rows whose logits exist at a time


@dataclass(frozen=True, slots=True)
class Quality:
    """perplexity: of the tokens that the assistant wrote. kl: mean KL(original || changed) over
    them, in nats. agreement: share of them where both find the same token likeliest. tokens: how
    many there are. max_kl: the bound that was stated.
    """

    perplexity: float
    kl: float
    agreement: float
    tokens: int
    max_kl: float

    @property
    def passed(self) -> bool:
        """Whether the model is farther from the original than it may be."""
        return not self.kl <= self.max_kl

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f}, KL to the original {self.kl:.4f} (bound "
            f"{self.max_kl:g}), same likeliest token {self.agreement:.1%}, on {self.tokens} "
            "held-out tokens"
        )

    def json(self) -> dict[str, float]:
        return asdict(self)


class Yardstick:
    """Texts, and what the original made of them."""

    def __init__(self, original: OpenTarget, texts: Sequence[Example], max_kl: float) -> None:
        self._original, self._texts, self._max_kl = original, texts, max_kl
        self._states = [_states(original, text) for text in texts]

    def __call__(self, changed: OpenTarget) -> Quality:
        surprise = kl = 0.0
        same = tokens = 0
        for text, was_NC in zip(self._texts, self._states, strict=True):
            is_NC = _states(changed, text)
            labels_N = torch.tensor(text.tokens, device=is_NC.device)[_predicted(text)]
            pieces = (was_NC.split(PIECE), is_NC.split(PIECE), labels_N.split(PIECE))
            for was_nC, is_nC, labels_n in zip(*pieces, strict=True):
                was_nV = self._original.head_logits(was_nC).log_softmax(-1)
                is_nV = changed.head_logits(is_nC).log_softmax(-1)
                surprise -= float(is_nV.gather(1, labels_n[:, None]).double().sum())
                kl += float((was_nV.exp() * (was_nV - is_nV)).double().sum())
                same += int((was_nV.argmax(-1) == is_nV.argmax(-1)).sum())
            tokens += len(labels_N)
        count = max(tokens, 1)
        return Quality(math.exp(surprise / count), kl / count, same / count, tokens, self._max_kl)


def _predicted(text: Example) -> list[int]:
    """Places of the tokens that are supervised and have one in front."""
    return [place for place in range(1, len(text.tokens)) if text.supervised[place]]


def _states(target: OpenTarget, text: Example) -> Tensor:
    """What predicts them: states behind the final norm, [N, C]."""
    rows = [place - 1 for place in _predicted(text)]
    return Capture(target, ())([text]).final_BRC[0, rows]
