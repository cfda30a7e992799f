"""Medusa heads tried on the target's own text; `trial.py` says how.

Every head is compared with the tokens in all places near its own, which shows heads in another
order, heads that are one place off, and heads that only repeat what the target says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from forerun.interop.trial import Speech, Trial, is_better, tried
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.target import OpenTarget
from forerun.models.topk import best

RANKS = 10  # candidates of a head that are judged, as in published trees


def trial(heads: MedusaHeads, target: OpenTarget, speeches: Sequence[Speech]) -> Trial:
    """How often heads are right, and whether another reading of their files is right more often."""
    count = heads.config.heads
    hits = torch.cat([_hits(heads, target, speech) for speech in speeches])
    own = list(range(1, count + 1))
    found = [_best(hits[:, head], head + 1) for head in range(count)]
    others = [
        (
            "states in front of the final norm",
            "they read the wrong state of the target; train them again",
            partial(_in_place, heads, target, places=own, normed=False),
        )
    ]
    if found != own:
        named = ", ".join(map(str, found))
        others.append(
            (
                f"heads read as guessing {named} places on instead of {', '.join(map(str, own))}",
                _remedy(found, own),
                partial(_in_place, heads, target, places=found),
            )
        )
    trial = tried("head", speeches, partial(_in_place, heads, target, places=own), others)
    return replace(trial, right_by_rank=right_by_rank(heads, target, speeches))


def right_by_rank(
    heads: MedusaHeads, target: OpenTarget, speeches: Sequence[Speech]
) -> list[list[float]]:
    """Per head and rank, how often that candidate was what the target said in the head's place."""
    own = slice(1, heads.config.heads + 1)
    right_AKR = [
        _said(heads, target, speech, ranks=RANKS) == _behind(heads, speech)[:, own, None]
        for speech in speeches
    ]
    shares: list[list[float]] = torch.cat(right_AKR).float().mean(0).tolist()
    return shares


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


def _hits(heads: MedusaHeads, target: OpenTarget, speech: Speech, normed: bool = True) -> Tensor:
    """[A, K, P]: whether each head says the token P places on. Place 0 is the last known token,
    which the target said itself of the state that the heads read."""
    said_AK = _said(heads, target, speech, normed)[..., 0]
    hits_AKP: Tensor = said_AK[..., None] == _behind(heads, speech)[:, None]
    return hits_AKP


@torch.inference_mode()
def _said(
    heads: MedusaHeads, target: OpenTarget, speech: Speech, normed: bool = True, ranks: int = 1
) -> Tensor:
    """[A, K, ranks]: the likeliest tokens of each head behind each place, best first."""
    states_AC = speech.taps_RBC[_places(heads, speech) - 1, -1]
    if normed:
        states_AC = target.final_norm(states_AC)
    logits_AKU = heads(states_AC, target.head_logits)
    columns_NR, _ = best(logits_AKU.flatten(0, 1), min(ranks, logits_AKU.shape[-1]))
    if heads.token_map is not None:
        columns_NR = heads.token_map[columns_NR]
    said_AKR: Tensor = columns_NR.unflatten(0, logits_AKU.shape[:2]).cpu()
    return said_AKR


def _behind(heads: MedusaHeads, speech: Speech) -> Tensor:
    """[A, P]: the last known token at each place, and what was said behind it."""
    known_A1 = torch.tensor(speech.tokens)[_places(heads, speech), None]
    return torch.cat((known_A1, speech.said(heads.config.heads + 1)), 1)


def _places(heads: MedusaHeads, speech: Speech) -> Tensor:
    return speech.places(heads.config.heads + 1)
