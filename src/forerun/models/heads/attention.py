"""Attention of draft layers: rotary positions, an explicit mask, keys and values kept outside.

`Attention.forward` is one causal or masked layer. Its three parts, `queries`, `keys_values` and
`attend`, serve layers whose keys come from elsewhere, such as a fused context.

B sequences, R rows, K keys, C hidden size, H heads, G kv heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.heads.layers import LayerSettings, RMSNorm
from forerun.models.rope import Rope


class Rotation:
    """Rotary angles of the rows of one pass; all its layers share them."""

    def __init__(self, rope: Rope, positions_BR: Tensor) -> None:
        cosine_PD, sine_PD = rope.tables(int(positions_BR.max()) + 1)
        self.cosine_B1RD = cosine_PD[positions_BR][:, None]
        self.sine_B1RD = sine_PD[positions_BR][:, None]

    def __call__(self, x_BHRD: Tensor) -> Tensor:
        """Rotated in float32, given back in the type of x."""
        a_BHRD, b_BHRD = x_BHRD.float().chunk(2, dim=-1)
        cosine, sine = self.cosine_B1RD, self.sine_B1RD
        turned_BHRD = torch.cat(
            (a_BHRD * cosine - b_BHRD * sine, b_BHRD * cosine + a_BHRD * sine), -1
        )
        return turned_BHRD.to(x_BHRD.dtype)


class KeysValues(Protocol):
    """Where a network keeps the keys and values of earlier passes."""

    def append(self, layer: int, keys_BGRD: Tensor, values_BGRD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the rows of a pass; all keys and values of this layer, [B, G, K, D], in the order
        of the columns of the mask."""
        ...


class Joined:
    """Keys and values joined pass by pass; gradients run through. For training and for tests."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys_BGRD: Tensor, values_BGRD: Tensor) -> tuple[Tensor, Tensor]:
        if earlier := self.layers.get(layer):
            keys_BGRD = torch.cat((earlier[0], keys_BGRD), 2)
            values_BGRD = torch.cat((earlier[1], values_BGRD), 2)
        self.layers[layer] = keys_BGRD, values_BGRD
        return keys_BGRD, values_BGRD


class Attention(nn.Module):
    """Grouped-query attention. input_size: width of x where it is not the hidden size (EAGLE-3)."""

    def __init__(self, settings: LayerSettings, input_size: int | None = None) -> None:
        super().__init__()
        c, bias = settings, settings.attention_bias
        size = input_size or c.hidden_size
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(size, c.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=bias)
        if c.qk_norm:
            self.q_norm: nn.Module = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm: nn.Module = RMSNorm(c.head_dim, c.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self, x_BRC: Tensor, rotation: Rotation, mask_BRK: Tensor, past: KeysValues, layer: int = 0
    ) -> Tensor:
        """mask_BRK: bool, the keys that each row sees, those of this pass last. Every row must see
        one, padding too."""
        keys_BGKD, values_BGKD = past.append(layer, *self.keys_values(x_BRC, rotation))
        return self.attend(self.queries(x_BRC, rotation), keys_BGKD, values_BGKD, mask_BRK)

    def queries(self, x_BRC: Tensor, rotation: Rotation) -> Tensor:
        """[B, H, R, D], rotated."""
        return rotation(self.q_norm(self._heads(self.q_proj(x_BRC))))

    def keys_values(self, x_BRC: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[B, G, R, D] each, keys rotated."""
        keys_BGRD = rotation(self.k_norm(self._heads(self.k_proj(x_BRC))))
        return keys_BGRD, self._heads(self.v_proj(x_BRC))

    def attend(
        self, q_BHRD: Tensor, keys_BGKD: Tensor, values_BGKD: Tensor, mask_BRK: Tensor | None
    ) -> Tensor:
        """[B, R, C] behind the output projection; without a mask all rows see all keys."""
        mask_B1RK = None if mask_BRK is None else mask_BRK[:, None]
        out_BHRD = functional.scaled_dot_product_attention(
            q_BHRD, keys_BGKD, values_BGKD, attn_mask=mask_B1RK, enable_gqa=True
        )
        out_BRC: Tensor = self.o_proj(out_BHRD.transpose(1, 2).flatten(2))
        return out_BRC

    def _heads(self, x_BRC: Tensor) -> Tensor:
        return x_BRC.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
