"""A decoder layer of the Llama family as a module: attention and MLP, each behind a norm.

B sequences, R rows, C hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from forerun.models.heads.attention import Attention, Memory, Rotation
from forerun.models.heads.layers import MLP, LayerSettings, RMSNorm


class DecoderLayer(nn.Module):
    """normed: whether there is a norm before attention; the first layer of EAGLE-1 has none."""

    def __init__(self, settings: LayerSettings, normed: bool = True) -> None:
        super().__init__()
        c = settings
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps) if normed else nn.Identity()
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_BRC: Tensor, rotation: Rotation, memory: Memory, index: int) -> Tensor:
        x_BRC = x_BRC + self.self_attn(self.input_layernorm(x_BRC), rotation, memory, index)
        y_BRC: Tensor = x_BRC + self.mlp(self.post_attention_layernorm(x_BRC))
        return y_BRC
