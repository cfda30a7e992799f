"""What the layers of all draft networks are made of.

B sequences, R rows, C hidden size, I width of the MLP.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from forerun.config import Settings
from forerun.models.norm import rms_norm
from forerun.models.weights import Weights

Size = Annotated[int, Field(ge=1)]


class LayerSettings(Settings):
    """The numbers of a draft's decoder layers, which need not be those of its target.

    rope_scaling: as `Rope` takes it. max_length: positions the draft was made for.
    sliding_window: keys a row sees, its own included; None: all.
    """

    hidden_size: Size
    intermediate_size: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    max_length: Size
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: Size | None = None
    attention_bias: bool = False
    o_bias: bool | None = None  # of the output projection; None: as the other three
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k


class RMSNorm(nn.Module):
    """`models.norm.rms_norm` with a weight that can be trained."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BRC: Tensor) -> Tensor:
        return rms_norm(x_BRC, self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        c, bias = settings, settings.mlp_bias
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=bias)

    def forward(self, x_BRC: Tensor) -> Tensor:
        gated_BRI = functional.silu(self.gate_proj(x_BRC)) * self.up_proj(x_BRC)
        out_BRC: Tensor = self.down_proj(gated_BRI)
        return out_BRC


def fill(module: nn.Module, weights: Weights) -> None:
    """Give a network (made on the meta device) its tensors, whose names are those of `weights`.

    Integers keep their type. Raises `CheckpointError` when one is missing, has another shape or is
    left over.
    """
    tensors = {}
    for name, wanted in module.state_dict().items():
        dtype = None if wanted.is_floating_point() else wanted.dtype
        tensors[name] = weights.take(name, *wanted.shape, dtype=dtype)
    weights.finish()
    module.load_state_dict(tensors, assign=True)
