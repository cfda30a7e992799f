"""DFlash drafts tried on the target's own text; `trial.py` says how.

A block is drafted at every place of a text, all of them in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.interop.trial import Speech, Trial, tried
from forerun.models.heads.dflash import DFlash, DFlashConfig, said_behind
from forerun.models.target import OpenTarget, TargetInfo


def trial(draft: DFlash, target: OpenTarget, speeches: Sequence[Speech]) -> Trial:
    """How often a draft is right, and whether another reading of its files is right more often."""
    others = [
        (reading, remedy, partial(_right, _read_as(draft, changes), target))
        for reading, remedy, changes in _readings(draft.config, target.info)
    ]
    return tried("slot", speeches, partial(_right, draft, target), others)


def _readings(
    config: DFlashConfig, info: TargetInfo
) -> Iterator[tuple[str, str, dict[str, object]]]:
    """What it is called, what to do, and the settings that change."""
    place, option = "anchor first", "anchor-first"
    if config.anchor_first:
        place, option = "in place", "in-place"
    yield (
        f"blocks that draft {place}",
        f"set sample_from_anchor {str(not config.anchor_first).lower()} in config.json, "
        f"or draft with slots={option}",
        {"anchor_first": not config.anchor_first},
    )
    for by in (-1, 1):
        taps = tuple(tap + by for tap in config.taps)
        if taps[0] >= 0 and taps[-1] <= info.layers:
            outputs = ", ".join(str(tap - 1) for tap in taps)
            yield (
                f"the outputs of layers {outputs}",
                f"name these in config.json (target_layer_ids [{outputs}], or "
                f"aux_hidden_state_layer_ids {list(taps)} in speculators' layout)",
                {"taps": taps},
            )
    if info.rope_base not in (None, config.rope_theta):
        base = info.rope_base
        yield f"rotary base {base:g}", "set rope_theta so in config.json", {"rope_theta": base}
    if config.own_embedding and config.hidden_size == info.hidden_size:
        yield "the target's embedding", "remove embed_tokens.weight", {"own_embedding": False}


def _read_as(draft: DFlash, changes: dict[str, object]) -> DFlash:
    """The same tensors under another config."""
    with torch.device("meta"):
        other = DFlash(draft.config.model_copy(update=changes))
    tensors = draft.state_dict()
    other.load_state_dict({name: tensors[name] for name in other.state_dict()}, assign=True)
    return other


def _right(draft: DFlash, target: OpenTarget, speech: Speech) -> Tensor:
    """[A, K]: whether each drafting slot is what the target said."""
    config = draft.config
    reach = config.block_size  # whatever the slots are read as, so that places can be compared
    taps_RTC = speech.taps_RBC[:, list(config.taps)]
    drafted_AQ = said_behind(draft, target, speech.tokens, taps_RTC, speech.places(reach))
    said_AK = speech.said(reach)[:, : config.drafts]
    return drafted_AQ[:, config.first_slot :].cpu() == said_AK
