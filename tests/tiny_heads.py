"""Random trained drafters of a few thousand weights, as folders in published layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.interop import dflash
from forerun.models.heads.dflash import DFlash, DFlashConfig, LayerAttention
from forerun.models.target import TargetInfo


def tiny_dflash_module(target: TargetInfo, *, seed: int = 0, **numbers: Any) -> DFlash:
    """A random DFlash draft for a target as wide as itself, drafting in place.

    Its layers add little to the residual stream, so that a block which drafts anchor first is right
    now and then: what the head makes of a token's embedding is a guess at what follows.
    """
    values: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "max_length": target.max_length,
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "target_hidden_size": target.hidden_size,
        "target_layers": target.layers,
        "taps": (1, 2, target.layers),
        "block_size": 5,
        "mask_token": target.vocab_size - 1,
        **numbers,
    }
    values.setdefault("attention", (LayerAttention(),) * values["layers"])
    module = DFlash(DFlashConfig(**values))
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        random = torch.randn(parameter.shape, generator=noise)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.1 * random
        else:
            weak = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.data = random * parameter.shape[-1] ** -0.5 * (0.3 if weak else 1)
    if module.config.reduced:
        size = module.config.draft_vocab_size
        ids_U = torch.randperm(target.vocab_size, generator=noise)[:size].sort().values
        module.d2t = ids_U - torch.arange(len(ids_U))
    return module.requires_grad_(False)


def tiny_dflash(folder: Path, target: TargetInfo, **numbers: Any) -> Path:
    """The same, drafting anchor first, as a folder in speculators layout."""
    module = tiny_dflash_module(target, **{"anchor_first": True, **numbers})
    dflash.export(module, "speculators", folder)
    return folder
