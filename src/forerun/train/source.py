"""The target's own weights as a start for drafts: float32, under their published names.

The loaded target has its matrices fused and laid out for speed; these are read from its files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from forerun.models.architecture import DecoderConfig
from forerun.models.heads.layers import RMSNorm
from forerun.models.hub import LoadedModel, decoder_weights, locate
from forerun.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Source:
    """A target's numbers and tensors."""

    numbers: DecoderConfig
    weights: Weights

    def start_linear(self, network: nn.Module, place: str, name: str, first: int = 0) -> None:
        """Copy a matrix (and its bias) of the target into a layer of a network, into the columns
        from `first` on."""
        linear = network.get_submodule(place)
        assert isinstance(linear, nn.Linear)
        rows, columns = linear.weight.shape
        linear.weight.data[:, first:] = self.weights.take(f"{name}.weight", rows, columns - first)
        if linear.bias is not None:
            linear.bias.data.copy_(self.weights.take(f"{name}.bias", rows))

    def start_norm(self, network: nn.Module, place: str, name: str) -> None:
        """Copy the weight of a norm; drafts multiply by it as it is, Gemma adds 1 first."""
        norm = network.get_submodule(place)
        assert isinstance(norm, RMSNorm)
        weight_C = self.weights.take(f"{name}.weight", len(norm.weight))
        norm.weight.data.copy_(weight_C + self.numbers.norm_offset)

    @property
    def last_layer(self) -> str:
        """What the names of its tensors begin with."""
        return f"model.layers.{self.numbers.layers - 1}"

    @property
    def before_mlp(self) -> str:
        """The name of the norm in front of the MLP."""
        if self.numbers.sandwich_norms:
            return "pre_feedforward_layernorm"
        return "post_attention_layernorm"


def source(model: LoadedModel) -> Source:
    """Where a loaded target was read from. Raises `ModelError` if it is gone."""
    return Source(*decoder_weights(locate(model.name), torch.float32))
