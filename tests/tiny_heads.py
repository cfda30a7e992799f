"""Random trained drafters of a few thousand weights, as folders in published layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from forerun.interop import dflash, eagle, medusa
from forerun.models.heads.dflash import DFlash, DFlashConfig, LayerAttention
from forerun.models.heads.eagle import (
    Eagle1,
    Eagle1Settings,
    Eagle3,
    Eagle3Settings,
    EagleDraft,
)
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.hub import LoadedModel
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


def tiny_medusa_module(
    model: Path,
    *,
    heads: int = 3,
    layers: int = 1,
    seed: int = 0,
    strength: float = 0.3,
    **numbers: Any,
) -> MedusaHeads:
    """Random heads for the Llama in a folder of `tiny_folder`.

    With little strength they change little about what the target itself would write next, so that
    they are right where a text repeats itself.
    """
    weights = load_file(model / "model.safetensors")
    rows, hidden = weights["lm_head.weight"].shape
    values = {"hidden_size": hidden, "heads": heads, "layers": layers, "vocab_size": rows}
    module = MedusaHeads(MedusaConfig(**{**values, **numbers}))
    noise = torch.Generator().manual_seed(seed)
    ids_U = torch.arange(rows)
    if module.token_map is not None:
        ids_U = module.token_map = torch.randperm(rows, generator=noise)[: len(module.token_map)]
    for name, parameter in module.named_parameters():
        random = torch.randn(parameter.shape, generator=noise)
        if name.startswith("lm_heads."):
            parameter.data = weights["lm_head.weight"][ids_U] + 0.1 * random
        else:
            parameter.data = strength * random * hidden**-0.5
    return module.requires_grad_(False)


def tiny_medusa(folder: Path, model: Path, layout: str = "vllm", **numbers: Any) -> Path:
    """The same as a folder in a published layout."""
    medusa.export(tiny_medusa_module(model, **numbers), layout, folder, str(model))
    return folder


def tiny_eagle_module(
    target: TargetInfo, kind: str = "eagle3", *, seed: int = 0, **numbers: Any
) -> Eagle1 | Eagle3:
    """A random EAGLE draft; `kind` is eagle or eagle3."""
    values: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "max_length": target.max_length,
        **numbers,
    }
    module: Eagle1 | Eagle3
    if kind == "eagle":
        module = Eagle1(Eagle1Settings(**values))
    else:
        values = {
            "target_hidden_size": target.hidden_size,
            "taps": (1, 2, target.layers),
            "draft_vocab_size": target.vocab_size,
            **values,
        }
        module = Eagle3(Eagle3Settings(**values))
    noise = torch.Generator().manual_seed(seed)
    _randomise(module, noise)
    if module.d2t is not None:
        size = len(module.d2t)
        ids_U = torch.randperm(target.vocab_size, generator=noise)[:size].sort().values
        module.d2t = ids_U - torch.arange(size)
    return module.requires_grad_(False)


def _randomise(module: EagleDraft, noise: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        random = torch.randn(parameter.shape, generator=noise)
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.data = 1 + 0.2 * random
        else:
            parameter.data = random * parameter.shape[-1] ** -0.5


def tiny_eagle(
    folder: Path, target: LoadedModel, kind: str = "eagle3", layout: str = "vllm", **numbers: Any
) -> Path:
    """A draft that is right now and then, as a folder.

    What it hands to the output matrix is mostly the embedding of the last token, as in the target.
    In EAGLE-3, whose residual stream starts from the target's states, attention puts it there: it
    looks at the row itself and copies the embedding.
    """
    module = tiny_eagle_module(target.target.info, kind, **numbers)
    hidden = module.settings.hidden_size
    eye = torch.eye(hidden)
    if isinstance(module, Eagle1):
        module.fc.weight.data = torch.cat((eye, 0.1 * eye), 1)
        module.layers[0].mlp.down_proj.weight.data *= 0.1
        module.layers[0].self_attn.o_proj.weight.data *= 0.1
    else:
        module.fc.weight.data *= 0.1
        layer = module.layers[0]
        layer.mlp.down_proj.weight.data *= 0.1
        attention = layer.self_attn
        attention.q_proj.weight.data[:, hidden:] = 0
        attention.q_proj.weight.data[:, :hidden] *= 8
        attention.k_proj.weight.data = attention.q_proj.weight.data[[*range(16), *range(32, 48)]]
        attention.v_proj.weight.data = torch.cat((eye, 0 * eye), 1)
        attention.o_proj.weight.data.zero_()
        attention.o_proj.weight.data[:16, :16] = torch.eye(16)
        attention.o_proj.weight.data[16:, 32:48] = torch.eye(16)
        if module.lm_head is not None:
            ids_U = module.target_ids(torch.arange(module.settings.draft_vocab_size))
            module.lm_head.weight.data = _head_rows(target)[ids_U]
    eagle.export(module, layout, folder)
    return folder


def _head_rows(target: LoadedModel) -> torch.Tensor:
    """The output matrix of a target, [V, C]."""
    hidden = target.target.info.hidden_size
    return target.target.head_logits(torch.eye(hidden)).T.contiguous()
