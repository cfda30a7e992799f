"""EAGLE drafts tried on the target's own text; `trial.py` says how.

All places of a text are drafted from side by side. A drafted row sees the stable rows up to its
place and the drafted rows of the same place; it is fed the token that was said, so each level is
judged for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from forerun.interop.eagle_configs import TAPS
from forerun.interop.trial import Speech, Trial, tried
from forerun.models.heads.attention import Joined
from forerun.models.heads.eagle import (
    Eagle1,
    Eagle1Settings,
    Eagle3,
    Eagle3Settings,
    EagleSettings,
    default_taps,
)
from forerun.models.target import OpenTarget, TargetInfo

LEVELS = 4
SAFEAILAB_BASE = 10_000.0  # whatever its configs say


def trial(draft: Eagle1 | Eagle3, target: OpenTarget, speeches: Sequence[Speech]) -> Trial:
    """How often a draft is right, and whether another reading of its files is right more often."""
    others = [
        (reading, remedy, partial(_right, _read_as(draft, settings), target))
        for reading, remedy, settings in _readings(draft.settings, target.info)
    ]
    return tried("level", speeches, partial(_right, draft, target), others)


def _readings(
    settings: EagleSettings, info: TargetInfo
) -> Iterator[tuple[str, str, dict[str, object]]]:
    """What it is called, what to do, and the settings that change."""
    if isinstance(settings, Eagle3Settings):
        stated = settings.taps or default_taps(info.layers)
        for taps in dict.fromkeys(
            (_shifted(stated, -1), _shifted(stated, 1), default_taps(info.layers))
        ):
            if taps != stated and _ascend(taps, info.layers) and len(taps) == settings.tap_count:
                named = ", ".join(map(str, taps))
                yield (
                    f"the states before layers {named}",
                    f"write {TAPS} [{named}] at the top of config.json",
                    {"taps": taps},
                )
        for flag in ("norm_before_residual", "norm_output"):
            value = not getattr(settings, flag)
            written = str(value).lower()
            yield f"{flag} {written}", "set it so in config.json", {flag: value}
    for base in dict.fromkeys((info.rope_base, SAFEAILAB_BASE)):
        if base and base != settings.rope_theta:
            yield f"rotary base {base:g}", "set rope_theta so in config.json", {"rope_theta": base}
    if settings.own_embedding and settings.hidden_size == info.hidden_size:
        yield "the target's embedding", "remove embed_tokens.weight", {"own_embedding": False}


def _shifted(taps: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(tap + by for tap in taps)


def _ascend(taps: tuple[int, ...], layers: int) -> bool:
    return taps[0] >= 0 and taps[-1] <= layers and all(a < b for a, b in pairwise(taps))


def _read_as(draft: Eagle1 | Eagle3, changes: dict[str, object]) -> Eagle1 | Eagle3:
    """The same tensors under other settings."""
    settings = draft.settings.model_copy(update=changes)
    other: Eagle1 | Eagle3
    with torch.device("meta"):
        if isinstance(settings, Eagle3Settings):
            other = Eagle3(settings)
        else:
            assert isinstance(settings, Eagle1Settings)
            other = Eagle1(settings)
    tensors = draft.state_dict()
    other.load_state_dict({name: tensors[name] for name in other.state_dict()}, assign=True)
    return other


@torch.inference_mode()
def _right(draft: Eagle1 | Eagle3, target: OpenTarget, speech: Speech) -> Tensor:
    """[A, K]: whether each level is what the target said."""
    device = target.info.device
    tokens_R = torch.tensor(speech.tokens, device=device)
    places_A, said_AK = speech.places(LEVELS).to(device), speech.said(LEVELS).to(device)
    features_RF = features_of(draft, target, speech)[:-1]
    rows_R = torch.arange(len(features_RF), device=device)
    memory = Joined()
    mask_QK = rows_R[:, None] >= rows_R
    positions_K = rows_R
    hidden_1QC, next_Q = draft.fuse(features_RF[None]), tokens_R[1:]
    positions_Q, found = rows_R, []
    for level in range(LEVELS):
        if level:
            own_AA = torch.eye(len(places_A), dtype=torch.bool, device=device)
            stable_AR = rows_R < places_A[:, None]
            mask_QK = torch.cat((stable_AR, *[own_AA] * level), 1)
            positions_Q, next_Q = places_A + level - 1, said_AK[:, level - 1]
            positions_K = torch.cat((positions_K, positions_Q))
        if window := draft.settings.sliding_window:
            mask_QK = mask_QK & (positions_Q[:, None] - positions_K < window)
        memory.mask_BRK = mask_QK[None]
        hidden_1QC = draft(
            hidden_1QC, _embedded(draft, target, next_Q)[None], positions_Q[None], memory
        )
        if not level:
            hidden_1QC = hidden_1QC[:, places_A - 1]
        found.append(_said(draft, target, hidden_1QC[0]))
    return torch.stack(found, 1) == said_AK


def features_of(draft: Eagle1 | Eagle3, target: OpenTarget, speech: Speech) -> Tensor:
    """What the draft is fed of each token, [R, F]."""
    if isinstance(draft, Eagle1):
        return target.final_norm(speech.taps_RBC[:, -1])
    taps = draft.settings.taps or default_taps(target.info.layers)
    return speech.taps_RBC[:, list(taps)].flatten(1)


def _embedded(draft: Eagle1 | Eagle3, target: OpenTarget, tokens_N: Tensor) -> Tensor:
    if draft.embed_tokens is None:
        return target.embed(tokens_N, scaled=False)
    rows_NC: Tensor = draft.embed_tokens(tokens_N)
    return rows_NC


def _said(draft: Eagle1 | Eagle3, target: OpenTarget, hidden_NC: Tensor) -> Tensor:
    states_NC = draft.readout(hidden_NC)
    head = draft.lm_head or target.head_logits
    return draft.target_ids(head(states_NC).argmax(-1))
