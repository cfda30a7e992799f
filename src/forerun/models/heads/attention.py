"""Attention of draft layers: rotary positions, keys and values kept outside of the network.

In `Attention.forward` the rows of a pass attend to those of earlier passes and to each other. Its
parts `queries`, `keys_values` and `attend` serve layers whose keys come from elsewhere, such as a
fused context.

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


class Rotary:
    """Makes the rotations of a network's passes, on the device of their rows."""

    def __init__(self, settings: LayerSettings) -> None:
        self._settings = settings
        self._rope: Rope | None = None

    def __call__(self, positions_BR: Tensor) -> Rotation:
        c, device = self._settings, positions_BR.device
        if self._rope is None or self._rope.device != device:
            self._rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, c.max_length, device)
        return Rotation(self._rope, positions_BR)


class Memory(Protocol):
    """Where a network finds the keys and values of earlier passes."""

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """Add the keys and values of this pass to those of the layer; what the queries find in
        them, [B, H, R, D]."""
        ...


class Joined:
    """Keys and values joined pass by pass; gradients run through. For training and for tests.

    mask_BRK: set before each pass: bool, the keys that each row sees, those of the pass last.
    Every row must see one, padding too.
    """

    def __init__(self) -> None:
        self.mask_BRK: Tensor | None = None
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        if earlier := self.layers.get(layer):
            keys_BGRD = torch.cat((earlier[0], keys_BGRD), 2)
            values_BGRD = torch.cat((earlier[1], values_BGRD), 2)
        self.layers[layer] = keys_BGRD, values_BGRD
        return attend(q_BHRD, keys_BGRD, values_BGRD, self.mask_BRK)


def attend(
    q_BHRD: Tensor, keys_BGKD: Tensor, values_BGKD: Tensor, mask_BRK: Tensor | None
) -> Tensor:
    """Scaled dot products over grouped heads, [B, H, R, D]; without a mask all rows see all."""
    mask_B1RK = None if mask_BRK is None else mask_BRK[:, None]
    return functional.scaled_dot_product_attention(
        q_BHRD, keys_BGKD, values_BGKD, attn_mask=mask_B1RK, enable_gqa=True
    )


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
        o_bias = bias if c.o_bias is None else c.o_bias
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=o_bias)
        if c.qk_norm:
            self.q_norm: nn.Module = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm: nn.Module = RMSNorm(c.head_dim, c.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x_BRC: Tensor, rotation: Rotation, memory: Memory, layer: int) -> Tensor:
        """Rows that attend to what the memory holds and to each other, [B, R, C]."""
        keys_BGRD, values_BGRD = self.keys_values(x_BRC, rotation)
        found_BHRD = memory.attend(layer, self.queries(x_BRC, rotation), keys_BGRD, values_BGRD)
        return self._project(found_BHRD)

    def queries(self, x_BRC: Tensor, rotation: Rotation) -> Tensor:
        """[B, H, R, D], rotated."""
        return rotation(self.q_norm(self._heads(self.q_proj, x_BRC)))

    def keys_values(self, x_BRC: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[B, G, R, D] each, keys rotated."""
        keys_BGRD = rotation(self.k_norm(self._heads(self.k_proj, x_BRC)))
        return keys_BGRD, self._heads(self.v_proj, x_BRC)

    def attend(
        self, q_BHRD: Tensor, keys_BGKD: Tensor, values_BGKD: Tensor, mask_BRK: Tensor | None
    ) -> Tensor:
        """[B, R, C] behind the output projection; without a mask all rows see all keys."""
        return self._project(attend(q_BHRD, keys_BGKD, values_BGKD, mask_BRK))

    def _project(self, found_BHRD: Tensor) -> Tensor:
        out_BRC: Tensor = self.o_proj(found_BHRD.transpose(1, 2).flatten(2))
        return out_BRC

    def _heads(self, projection: nn.Module, x_BRC: Tensor) -> Tensor:
        heads_BRHD: Tensor = projection(x_BRC).unflatten(-1, (-1, self.head_dim))
        return heads_BRHD.transpose(1, 2)
