"""DFlash drafts tried on the target's own text; `trial.py` says how.

A block is drafted at every place of a text, all of them in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.interop.trial import Speech, Trial, tried
from forerun.models.heads.dflash import DFlash, DFlashConfig, Injected
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


@torch.inference_mode()
def _right(draft: DFlash, target: OpenTarget, speech: Speech) -> Tensor:
    """[A, K]: whether each drafting slot is what the target said."""
    config, device = draft.config, target.info.device
    reach = config.block_size  # whatever the slots are read as, so that places can be compared
    places_A = speech.places(reach).to(device)
    said_AK = speech.said(reach)[:, : config.drafts].to(device)
    context_1K = torch.arange(len(speech.tokens), device=device)[None]
    positions_AQ = places_A[:, None] + torch.arange(config.block_size, device=device)
    anchors_AQ = places_A[:, None].expand_as(positions_AQ)
    tokens_AQ = torch.full_like(positions_AQ, config.mask_token)
    tokens_AQ[:, 0] = torch.tensor(speech.tokens, device=device)[places_A]
    embedded_NC = draft.embed(tokens_AQ.flatten(), partial(target.embed, scaled=False))
    positions_1N, anchors_1N = positions_AQ.reshape(1, -1), anchors_AQ.reshape(1, -1)
    memory = Injected(
        draft.context_kv(speech.taps_RBC[None, :, list(config.taps)], context_1K),
        draft.visible(positions_1N, anchors_1N, context_1K),
    )
    hidden_NC = draft(embedded_NC[None], positions_1N, memory)[0]
    drafted_AKC = hidden_NC.unflatten(0, positions_AQ.shape)[:, config.first_slot :]
    said_N = draft.logits(drafted_AKC.flatten(0, 1), target.head_logits).argmax(-1)
    if (ids_U := draft.token_ids) is not None:
        said_N = ids_U[said_N]
    return said_N.view_as(said_AK) == said_AK
