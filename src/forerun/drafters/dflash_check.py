"""Which slots of a DFlash draft predict what, tried on the target's own text.

Checkpoints of both kinds look alike, and the wrong reading shifts every draft by one without an
error. A block is the same in both: the token behind the anchor is predicted by slot 0 where the
draft is anchor first, by slot 1 where it drafts in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun import sampling
from forerun.errors import ConfigError
from forerun.models.heads.dflash import DFlash, said_behind
from forerun.models.target import OpenTarget, Segment

LENGTH = 64  # tokens that are looked at
ENOUGH = 0.1  # of the first drafted tokens are right with any draft worth having


@dataclass(frozen=True, slots=True)
class FirstAcceptance:
    """How often the token behind the anchor was predicted, by either slot."""

    anchor_first: float
    in_place: float

    @property
    def says_anchor_first(self) -> bool:
        """Raises `ConfigError` where neither slot predicts anything."""
        best = max(self.anchor_first, self.in_place)
        if best < ENOUGH:
            raise ConfigError(
                f"the draft is right about {best:.0%} of next tokens, whichever slot drafts: it "
                "was made for another model, or reads the wrong layers, or has the wrong rotary "
                "base; compare its config.json with where it came from"
            )
        return self.anchor_first > self.in_place


@torch.inference_mode()
def self_check(module: DFlash, target: OpenTarget, prompt: Sequence[int]) -> FirstAcceptance:
    """Let the target continue `prompt` greedily and draft behind each of the tokens it says."""
    tokens, taps_KTE = _continued(target, prompt, module.config.taps)
    anchors_A = torch.arange(len(prompt), len(tokens) - 1)
    said_AQ = said_behind(module, target, tokens, taps_KTE, anchors_A).cpu()
    right_AQ = said_AQ[:, :2] == torch.tensor(tokens)[anchors_A + 1, None]
    return FirstAcceptance(*right_AQ.float().mean(0).tolist())


def _continued(
    target: OpenTarget, prompt: Sequence[int], taps: Sequence[int]
) -> tuple[list[int], Tensor]:
    """The prompt with what the target says next, and the taps of all tokens but the last."""
    tokens = list(prompt)
    store = target.new_store(len(prompt) + LENGTH)
    span = store.open()
    store.reserve(span, len(prompt) + LENGTH)
    found = []
    while len(tokens) < len(prompt) + LENGTH:
        rows = tokens[span.length :]
        result = target.forward([Segment(span, rows, logits_from=len(rows) - 1)], store, taps)
        store.extend(span, len(rows))
        tokens += sampling.argmax(result.logits_NV)
        assert result.taps_RTD is not None
        found.append(result.taps_RTD)
    return tokens, torch.cat(found)
