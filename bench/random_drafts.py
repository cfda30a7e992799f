"""Trained drafts with random weights, as folders: they cost what real ones of their size cost.

Beliefs are as peaked as those of a real draft, so that trees have the shapes of real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.interop import dflash, eagle, medusa
from forerun.models.heads.dflash import DFlash, DFlashConfig, LayerAttention
from forerun.models.heads.eagle import Eagle1, Eagle1Settings, Eagle3, Eagle3Settings, default_taps
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.target import TargetInfo

AHEAD = 4  # tokens
VOCAB = 8192  # of the draft
PEAKED = 4.0  # standard deviation of its logits
DFLASH_LAYERS = 2

# The layers of SmolLM2-135M, which are those of the drafts, too.
LAYER: dict[str, Any] = {"intermediate_size": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64}


def write(folder: Path, target: TargetInfo) -> dict[str, Path]:
    """Drafts for a target, by the name of their drafter. EAGLE-1 has no vocabulary of its own."""
    size: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
    }
    layer = {**size, **LAYER, "max_length": target.max_length}
    taps = default_taps(target.layers)
    medusa_heads = MedusaHeads(MedusaConfig(**size, heads=AHEAD, draft_vocab_size=VOCAB))
    eagle1 = Eagle1(Eagle1Settings(**layer))
    eagle3 = Eagle3(
        Eagle3Settings(
            **layer,
            target_hidden_size=target.hidden_size,
            taps=taps,
            draft_vocab_size=VOCAB,
        )
    )
    block = DFlash(
        DFlashConfig(
            **layer,
            layers=DFLASH_LAYERS,
            target_hidden_size=target.hidden_size,
            target_layers=target.layers,
            taps=taps,
            block_size=1 + AHEAD,
            mask_token=target.vocab_size - 1,
            attention=(LayerAttention(),) * DFLASH_LAYERS,
            draft_vocab_size=VOCAB,
        )
    )
    folders = {name: folder / name for name in ("medusa", "eagle", "eagle3", "dflash")}
    medusa.export(_random(medusa_heads, target), "vllm", folders["medusa"])
    eagle.export(_random(eagle1, target), "vllm", folders["eagle"])
    eagle.export(_random(eagle3, target), "vllm", folders["eagle3"])
    dflash.export(_random(block, target), "speculators", folders["dflash"])
    return folders


def _random(module: Any, target: TargetInfo) -> Any:
    noise = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            continue  # norms and biases are as they are made
        scale = PEAKED if "lm_head" in name else 1.0
        nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5, generator=noise)
    ids_U = torch.randperm(target.vocab_size, generator=noise)[:VOCAB].sort().values
    for name, buffer in module.named_buffers():
        buffer.copy_(ids_U if name == "token_map" else ids_U - torch.arange(VOCAB))
    return module.to(target.dtype).requires_grad_(False)
