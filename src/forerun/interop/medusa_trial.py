"""Medusa heads tried on the target's own text; `trial.py` says how.

Every head is compared with the tokens in all places near its own, which shows heads in another
order, heads that are one place off, and heads that only repeat what the target says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.interop.trial import Speech, Trial, is_better, tried
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.target import OpenTarget


def trial(heads: MedusaHeads, target: OpenTarget, speeches: Sequence[Speech]) -> Trial:
    """How often heads are right, and whether another reading of their files is right more often."""
    count = heads.config.heads
    hits = torch.cat([_hits(heads, target, speech) for speech in speeches])
    own = list(range(1, count + 1))
    best = [_best(hits[:, head], head + 1) for head in range(count)]
    others = [
        (
            "states in front of the final norm",
            "they read the wrong state of the target; train them again",
            partial(_in_place, heads, target, places=own, normed=False),
        )
    ]
    if best != own:
        named = ", ".join(map(str, best))
        others.append(
            (
                f"heads read as guessing {named} places on instead of {', '.join(map(str, own))}",
                _remedy(best, own),
                partial(_in_place, heads, target, places=best),
            )
        )
    return tried("head", speeches, partial(_in_place, heads, target, places=own), others)


def _best(hits_AP: Tensor, own: int) -> int:
    """The place that a head guesses: its own, unless another is clearly better."""
    place = int(hits_AP.float().mean(0).argmax())
    return place if is_better(hits_AP[:, [place]], hits_AP[:, [own]]) else own


def _remedy(best: list[int], own: list[int]) -> str:
    if not any(best):
        return "they only repeat what the target says itself, so they are not trained"
    if sorted(best) == own:
        return "they are stored in another order; rename their tensors"
    return "they were trained for other places; train them again"


def _in_place(
    heads: MedusaHeads,
    target: OpenTarget,
    speech: Speech,
    places: Sequence[int],
    normed: bool = True,
) -> Tensor:
    """[A, K]: whether each head is right about the token so many places on."""
    hits_AKP = _hits(heads, target, speech, normed)
    return torch.stack([hits_AKP[:, head, place] for head, place in enumerate(places)], 1)


@torch.inference_mode()
def _hits(heads: MedusaHeads, target: OpenTarget, speech: Speech, normed: bool = True) -> Tensor:
    """[A, K, P]: whether each head says the token P places on. Place 0 is the last known token,
    which the target said itself of the state that the heads read."""
    reach = heads.config.heads + 1
    places_A = speech.places(reach)
    states_AC = speech.taps_RBC[places_A - 1, -1]
    if normed:
        states_AC = target.final_norm(states_AC)
    said_AK = heads(states_AC, target.head_logits).argmax(-1)
    if heads.token_map is not None:
        said_AK = heads.token_map[said_AK]
    known_A1 = torch.tensor(speech.tokens)[places_A, None]
    truth_AP = torch.cat((known_A1, speech.said(reach)), 1)
    hits_AKP: Tensor = said_AK.cpu()[..., None] == truth_AP[:, None]
    return hits_AKP
