"""Trained drafts with random weights, as folders: they cost what real ones of their size cost.

Beliefs are as peaked as those of a real draft, so that trees have the shapes of real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def write(
    folder: Path,
    target: TargetInfo,
    names: Sequence[str] = ("medusa", "eagle", "eagle3", "dflash"),
    layer: Mapping[str, Any] = LAYER,
    dflash_layers: int = DFLASH_LAYERS,
) -> dict[str, Path]:
    """Drafts for a target, by the name of their drafter. EAGLE-1 has no vocabulary of its own."""
    vocab = min(VOCAB, target.vocab_size)
    size: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
    }
    layers = {**size, **layer, "max_length": target.max_length}
    taps = default_taps(target.layers)
    reads: dict[str, Any] = {
        "target_hidden_size": target.hidden_size,
        "taps": taps,
        "draft_vocab_size": vocab,
    }
    for name in names:
        if name == "medusa":
            heads = MedusaHeads(MedusaConfig(**size, heads=AHEAD, draft_vocab_size=vocab))
            medusa.export(_random(heads, target), "vllm", folder / name)
        elif name == "eagle":
            eagle.export(_random(Eagle1(Eagle1Settings(**layers)), target), "vllm", folder / name)
        elif name == "eagle3":
            eagle3 = Eagle3(Eagle3Settings(**layers, **reads))
            eagle.export(_random(eagle3, target), "vllm", folder / name)
        else:
            block = DFlash(
                DFlashConfig(
                    **layers,
                    **reads,
                    layers=dflash_layers,
                    target_layers=target.layers,
                    block_size=1 + AHEAD,
                    mask_token=target.vocab_size - 1,
                    attention=(LayerAttention(),) * dflash_layers,
                )
            )
            dflash.export(_random(block, target), "speculators", folder / name)
    return {name: folder / name for name in names}


def _random(module: Any, target: TargetInfo) -> Any:
    noise = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            continue  # norms and biases are as they are made
        scale = PEAKED if "lm_head" in name else 1.0
        nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5, generator=noise)
    vocab = min(VOCAB, target.vocab_size)
    ids_U = torch.randperm(target.vocab_size, generator=noise)[:vocab].sort().values
    for name, buffer in module.named_buffers():
        buffer.copy_(ids_U if name == "token_map" else ids_U - torch.arange(vocab))
    return module.to(target.dtype).requires_grad_(False)
