"""The target's own layers with gradients, for drafts that are trained together with it.

Embedding and output matrix stay as they are: small models tie them, and heads read the latter.

B sequences, R rows, C hidden size; of a matrix: O outputs, I inputs, K rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.errors import ConfigError
from forerun.models.architecture import DecoderConfig
from forerun.models.heads.attention import Rotary, attend
from forerun.models.heads.decoder_layer import DecoderLayer
from forerun.models.heads.layers import LayerSettings, RMSNorm, fill
from forerun.models.hub import decoder_weights, locate
from forerun.models.target import OpenTarget
from forerun.models.weights import Weights

ALPHA = 16  # of LoRA, as in the recipes of Medusa-2
PREFIX = "model."  # before the names of these tensors in published checkpoints


class Backbone(nn.Module):
    """float32. rank: of what is learned beside each matrix of the layers; None: all of their
    weights are learned. generator: for what starts at random; a fresh backbone computes what the
    target computes.

    Raises `ConfigError` for models whose layers are built otherwise.
    """

    def __init__(self, target: OpenTarget, rank: int | None, generator: torch.Generator) -> None:
        super().__init__()
        config, weights = decoder_weights(locate(target.info.name), torch.float32)
        settings = _settings(config)
        self._embed: Callable[[Tensor], Tensor] = target.embed
        self._rotary = Rotary(settings)
        self._windows = _windows(config)
        with torch.device("meta"):
            self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(config.layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        fill(self, _own(weights))
        if rank is not None:
            self.requires_grad_(False)
            for layer in self.layers:
                _adapt(layer, rank, generator)

    def forward(self, tokens_BR: Tensor) -> Tensor:
        """States behind the final norm, [B, R, C]; texts are padded at their ends."""
        embedded_NC = self._embed(tokens_BR.flatten()).float()
        x_BRC = embedded_NC.unflatten(0, tokens_BR.shape)
        rows_R = torch.arange(tokens_BR.shape[1], device=tokens_BR.device)
        rotation = self._rotary(rows_R.expand_as(tokens_BR))
        memory = _Text(rows_R, self._windows)
        for index, layer in enumerate(self.layers):
            x_BRC = layer(x_BRC, rotation, memory, index)
        normed_BRC: Tensor = self.norm(x_BRC)
        return normed_BRC

    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model that are others now, by their published names.

        weights: the state of this module, whole and on the CPU.
        """
        adapted = {
            name: module for name, module in self.named_modules() if isinstance(module, LowRank)
        }
        if not adapted:
            return {PREFIX + name: tensor for name, tensor in weights.items()}
        return {
            f"{PREFIX}{name}.weight": module.merged(
                weights[f"{name}.down_KI"], weights[f"{name}.up_OK"]
            )
            for name, module in adapted.items()
        }


class LowRank(nn.Module):
    """A frozen linear layer and what is learned beside it: the product of two thin matrices (LoRA,
    Hu et al. 2021, arXiv 2106.09685). What is frozen is no part of the state."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.register_buffer("weight_OI", linear.weight.detach(), persistent=False)
        bias = None if linear.bias is None else linear.bias.detach()
        self.register_buffer("bias_O", bias, persistent=False)
        self.down_KI = nn.Parameter(torch.randn(rank, inputs, generator=generator) * inputs**-0.5)
        self.up_OK = nn.Parameter(torch.zeros(outputs, rank))
        self._scale = ALPHA / rank

    def forward(self, x_BRI: Tensor) -> Tensor:
        learned_BRO = functional.linear(functional.linear(x_BRI, self.down_KI), self.up_OK)
        return functional.linear(x_BRI, self.weight_OI, self.bias_O) + self._scale * learned_BRO

    def merged(self, down_KI: Tensor, up_OK: Tensor) -> Tensor:
        """The one matrix that does the same, [O, I]."""
        return self.weight_OI.cpu() + self._scale * (up_OK @ down_KI)


class _Text:
    """The memory of a pass over whole texts: each row sees those up to itself, in layers with a
    window the last of them."""

    def __init__(self, rows_R: Tensor, windows: Sequence[int]) -> None:
        distance_RR = rows_R[:, None] - rows_R
        seen = dict.fromkeys({*windows}, (distance_RR >= 0)[None])
        for window in seen.keys() - {0}:
            seen[window] = seen[window] & (distance_RR < window)
        self._seen = [seen[window] for window in windows]

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        return attend(q_BHRD, keys_BGRD, values_BGRD, self._seen[layer])


def _settings(config: DecoderConfig) -> LayerSettings:
    if config.sandwich_norms or config.activation != "silu":
        raise ConfigError(
            "medusa2 trains the layers of Llama, Mistral, Qwen2 and Qwen3, not of "
            f"{config.architecture}; train medusa, which leaves the model as it is"
        )
    return LayerSettings(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_length=config.max_length,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        attention_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
    )


def _windows(config: DecoderConfig) -> list[int]:
    """Keys that a row sees, per layer; 0: all."""
    sliding = config.sliding_layers or (False,) * config.layers
    return [(config.sliding_window or 0) if each else 0 for each in sliding]


def _own(weights: Weights) -> Weights:
    """Those of the layers and the final norm."""
    entries = {
        name.removeprefix(PREFIX): entry
        for name, entry in weights.entries.items()
        if name.startswith((PREFIX + "layers.", PREFIX + "norm."))
    }
    return Weights(entries, weights.origin, weights.dtype)


def _adapt(layer: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Put low-rank matrices beside all linear layers."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, own = name.rpartition(".")
            small = LowRank(module, rank, generator)
            setattr(layer.get_submodule(parent), own, small)
