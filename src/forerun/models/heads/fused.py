"""Draft layers as the target's own are run: fused, laid out once, for inference alone.

The modules say what a network computes and are trained; what is made of them here computes the same
with the backends of `models/layers.py`, in compiled code where that can run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.architecture import DecoderConfig
from forerun.models.heads.attention import Attention
from forerun.models.heads.layers import MLP, LayerSettings, RMSNorm
from forerun.models.layers import Backend, Layer, Matrix, make_backend
from forerun.models.rope import Rope


def draft_backend(
    settings: LayerSettings, layers: int, dtype: torch.dtype, device: torch.device, *widths: int
) -> Backend:
    """What computes the layers of a draft. widths: of what else it multiplies or norms."""
    c = settings
    config = DecoderConfig(
        architecture="draft",
        vocab_size=1,  # heads say theirs
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        layers=layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_length=c.max_length,
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        rope_scaling=c.rope_scaling,
    )
    return make_backend(config, dtype, device, *widths)


def draft_rope(settings: LayerSettings, device: torch.device) -> Rope:
    """The rotary tables that all layers of a draft share."""
    c = settings
    return Rope(c.head_dim, c.rope_theta, c.rope_scaling, c.max_length, device)


def fused_layer(
    backend: Backend,
    index: int,
    attention: Attention,
    mlp: MLP,
    before_attention: nn.Module,
    before_mlp: nn.Module,
    rope: Rope,
    **flags: Any,
) -> Layer:
    """One decoder layer from its modules. flags: further fields of `Layer`."""
    return Layer(
        index=index,
        qkv=fused(backend, attention.q_proj, attention.k_proj, attention.v_proj),
        o=fused(backend, attention.o_proj),
        gate_up=fused(backend, mlp.gate_proj, mlp.up_proj),
        down=fused(backend, mlp.down_proj),
        rope=rope,
        before_attention_C=norm_weight(before_attention),
        before_mlp_C=required(norm_weight(before_mlp)),
        q_norm_D=norm_weight(attention.q_norm),
        k_norm_D=norm_weight(attention.k_norm),
        **{"window": 0, **flags},
    )


def fused(backend: Backend, *linears: nn.Linear) -> Matrix:
    """Linear layers with one input, their outputs side by side."""
    weight_OI = torch.cat([linear.weight.data for linear in linears])
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some have a bias, some have none"
    return backend.matrix(weight_OI, torch.cat(biases) if biases else None)


def norm_weight(norm: object) -> Tensor | None:
    """As backends take it; None where there is no norm."""
    return norm.weight.data.float().contiguous() if isinstance(norm, RMSNorm) else None


def required(weight_C: Tensor | None) -> Tensor:
    assert weight_C is not None
    return weight_C
