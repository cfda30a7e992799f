"""The layers of a decoder in plain PyTorch.

R rows, N rows without order, C hidden size, H heads, G kv heads, D head size; B segments, K keys,
M folded query rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.layers import Layer
from forerun.models.linear import Linear
from forerun.models.norm import normed
from forerun.models.packing import Packed
from forerun.models.rope import Rope
from forerun.models.topk import best


class Plain:
    """PyTorch only: any device, any type."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.scale = config.attention_scale or config.head_dim**-0.5

    def begin(self, packed: Packed, store: KVStore) -> None:
        self.store = weakref.proxy(store)  # a model outlives its stores, which are large
        self.rows = packed.rows
        device = store.kv.device
        nodes = [_nodes(packed, s) for s in range(len(packed.base_S))]
        rows = [node for segment in nodes for node in segment if node.is_row]
        self.positions_R = torch.tensor([row.position for row in rows], device=device)
        self.slots_R = torch.tensor([row.slot for row in rows], device=device)
        self.groups = [
            _group(packed, members, nodes, device) for members in _similar_segments(packed)
        ]

    def matrix(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        return Linear(weight_OI, bias_O)

    def run(
        self, hidden_RC: Tensor, layers: Sequence[Layer], beside_RC: Tensor | None = None
    ) -> Tensor:
        for layer in layers:
            hidden_RC = self._attend_half(layer, hidden_RC, beside_RC)
            hidden_RC = self._mlp_half(layer, hidden_RC)
        return hidden_RC

    def run_tapped(
        self, hidden_RC: Tensor, layers: Sequence[Layer], taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        tapped = {0: hidden_RC}
        for boundary, layer in enumerate(layers, 1):
            hidden_RC = self.run(hidden_RC, [layer])
            if boundary in taps:
                tapped[boundary] = hidden_RC
        return hidden_RC, torch.stack([tapped[boundary] for boundary in taps], 1)

    def append(self, x_RC: Tensor, layers: Sequence[Layer]) -> None:
        for layer in layers:
            self._place(layer, *self._heads(layer.qkv(x_RC))[1:])

    def linear(self, x_NI: Tensor, matrix: Linear) -> Tensor:
        return matrix(x_NI)

    def norm(self, x_NC: Tensor, weight_C: Tensor) -> Tensor:
        return self._norm(x_NC, weight_C)

    def add_silu(self, x_NC: Tensor, y_NC: Tensor) -> Tensor:
        return x_NC + functional.silu(y_NC)

    def logits(self, hidden_NC: Tensor, norm_C: Tensor | None, head: Linear) -> Tensor:
        return head(hidden_NC if norm_C is None else self._norm(hidden_NC, norm_C)).float()

    def rank(
        self, hidden_NC: Tensor, norm_C: Tensor | None, head: Linear, top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        columns_NK, shares_NK = best(self.logits(hidden_NC, norm_C, head), top_k)
        return columns_NK.tolist(), shares_NK.tolist()

    def _attend_half(self, layer: Layer, x_RC: Tensor, beside_RC: Tensor | None) -> Tensor:
        read_RX = x_RC
        if layer.before_attention_C is not None:
            read_RX = self._norm(x_RC, layer.before_attention_C)
        if layer.normed_residual:
            x_RC = read_RX
        if layer.beside_C is not None:
            assert beside_RC is not None, "this layer has two inputs"
            read_RX = torch.cat((self._norm(beside_RC, layer.beside_C), read_RX), -1)
        y_RC = self._attention(layer, layer.qkv(read_RX))
        return self._add(x_RC, layer.o, y_RC, layer.after_attention_C)

    def _mlp_half(self, layer: Layer, x_RC: Tensor) -> Tensor:
        y_RC = self._gated(layer.gate_up(self._norm(x_RC, layer.before_mlp_C)))
        return self._add(x_RC, layer.down, y_RC, layer.after_mlp_C)

    def _add(self, x_RC: Tensor, linear: Linear, y_RC: Tensor, norm_C: Tensor | None) -> Tensor:
        if norm_C is None:
            return linear(y_RC, residual_RO=x_RC)
        return self._norm(linear(y_RC), norm_C, residual_RC=x_RC)

    def _norm(self, x_RC: Tensor, weight_C: Tensor, residual_RC: Tensor | None = None) -> Tensor:
        y_RC = normed(x_RC, weight_C, self.config.norm_eps)
        return (y_RC if residual_RC is None else y_RC + residual_RC).to(x_RC.dtype)

    def _attention(self, layer: Layer, qkv_RC: Tensor) -> Tensor:
        q_RHD, k_RGD, v_RGD = self._heads(qkv_RC)
        q_RHD = self._rotate(q_RHD, layer.q_norm_D, layer.rope) * self.scale
        self._place(layer, k_RGD, v_RGD)
        out_RC = qkv_RC.new_zeros(len(qkv_RC), self.config.heads * self.config.head_dim)
        for group in self.groups:
            out_RC[group.rows_N] = self._attend(group, q_RHD, layer)
        return out_RC

    def _heads(self, qkv_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32, not yet rotated."""
        c = self.config
        qkv_RHD = qkv_RC[: self.rows].unflatten(-1, (-1, c.head_dim)).float()
        q_RHD, k_RGD, v_RGD = qkv_RHD.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        return q_RHD, k_RGD, v_RGD

    def _place(self, layer: Layer, k_RGD: Tensor, v_RGD: Tensor) -> None:
        k_RGD = self._rotate(k_RGD, layer.k_norm_D, layer.rope)
        keys_GSD, values_GSD = self.store.kv[layer.index]
        keys_GSD[:, self.slots_R] = k_RGD.transpose(0, 1).to(keys_GSD.dtype)
        values_GSD[:, self.slots_R] = v_RGD.transpose(0, 1).to(values_GSD.dtype)

    def _gated(self, gate_up_RC: Tensor) -> Tensor:
        gate_RC, up_RC = gate_up_RC.float().chunk(2, dim=-1)
        if self.config.activation == "silu":
            active_RC = functional.silu(gate_RC)
        else:
            active_RC = functional.gelu(gate_RC, approximate="tanh")
        return (active_RC * up_RC).to(gate_up_RC.dtype)

    def _rotate(self, x_RHD: Tensor, norm_D: Tensor | None, rope: Rope) -> Tensor:
        if norm_D is not None:
            x_RHD = self._norm(x_RHD, norm_D)
        cosine_PD, sine_PD = rope.tables(int(self.positions_R.max()) + 1)
        cosine_R1D = cosine_PD[self.positions_R, None]
        sine_R1D = sine_PD[self.positions_R, None]
        a_RHD, b_RHD = x_RHD.chunk(2, dim=-1)
        return torch.cat(
            (a_RHD * cosine_R1D - b_RHD * sine_R1D, b_RHD * cosine_R1D + a_RHD * sine_R1D), dim=-1
        )

    def _attend(self, group: _Group, q_RHD: Tensor, layer: Layer) -> Tensor:
        """Two batched products with the query heads of a kv head folded into rows."""
        c = self.config
        keys_GSD, values_GSD = self.store.kv[layer.index]
        keys_GBKD = keys_GSD[:, group.slots_BK].float()
        values_GBKD = values_GSD[:, group.slots_BK].float()
        batch, rows = group.padded_BR.shape
        q_BRGHD = q_RHD[group.padded_BR].unflatten(2, (c.kv_heads, -1))
        q_GBMD = q_BRGHD.permute(2, 0, 3, 1, 4).reshape(c.kv_heads, batch, -1, c.head_dim)
        scores_GBMK = q_GBMD @ keys_GBKD.transpose(-1, -2)
        if c.attention_softcap:
            scores_GBMK = c.attention_softcap * torch.tanh(scores_GBMK / c.attention_softcap)
        hidden_BRK = group.hidden(layer).repeat(1, c.heads // c.kv_heads, 1)
        weights_GBMK = scores_GBMK.masked_fill(hidden_BRK, -torch.inf).softmax(-1)
        out_GBMD = weights_GBMK @ values_GBKD
        out_GBHRD = out_GBMD.unflatten(2, (-1, rows))
        out_BRC = out_GBHRD.permute(1, 3, 0, 2, 4).reshape(batch, rows, -1)
        out_NC: Tensor = out_BRC[group.real_BR].to(keys_GSD.dtype)
        return out_NC


@dataclass(frozen=True, slots=True)
class _Node:
    position: int
    slot: int
    path: list[int]  # nodes of the segment from the first one on, itself last
    is_row: bool


def _nodes(packed: Packed, s: int) -> list[_Node]:
    """The nodes of a segment."""
    begin, end = packed.node_S1[s], packed.node_S1[s + 1]
    earlier = end - begin - (packed.first_S1[s + 1] - packed.first_S1[s])
    length = packed.length_S[s]
    nodes: list[_Node] = []
    for i, parent in enumerate(packed.parent_N[begin:end]):
        path = [i] if parent < 0 else [*nodes[parent].path, i]
        slot = packed.base_S[s] + length + i
        nodes.append(_Node(length + len(path) - 1, slot, path, i >= earlier))
    return nodes


@dataclass(frozen=True, slots=True)
class _Group:
    """B segments of similar size, padded to the same number of rows and keys."""

    rows_N: Tensor  # the group's rows
    padded_BR: Tensor  # the same with row 0 of the pass as padding
    real_BR: Tensor  # where padded_BR is no padding
    slots_BK: Tensor
    hidden_BRK: Tensor  # keys that are not on a row's path
    absent_BRK: Tensor  # keys that are padding
    distance_BRK: Tensor  # row position - key position
    lengths_B11: Tensor  # committed keys

    def hidden(self, layer: Layer) -> Tensor:
        """Keys that a row must not see. Padding rows see all: a softmax needs something."""
        hidden_BRK = self.absent_BRK if layer.both_ways else self.hidden_BRK
        if not layer.window:
            return hidden_BRK
        if layer.anchored:
            keys_K = torch.arange(hidden_BRK.shape[-1], device=hidden_BRK.device)
            outside_BRK = keys_K < self.lengths_B11 - layer.window
        else:
            outside_BRK = self.distance_BRK.abs() >= layer.window
        return (hidden_BRK | outside_BRK) & self.real_BR[..., None]


BIG = 64  # segments with more rows are attended alone: padding small ones to them would be waste


def _similar_segments(packed: Packed) -> list[list[int]]:
    sizes = [b - a for a, b in zip(packed.first_S1, packed.first_S1[1:], strict=False)]
    small = [s for s, size in enumerate(sizes) if size <= BIG]
    big = [[s] for s, size in enumerate(sizes) if size > BIG]
    return ([small] if small else []) + big


def _group(
    packed: Packed, members: list[int], nodes: list[list[_Node]], device: torch.device
) -> _Group:
    lengths = [packed.length_S[s] for s in members]
    keys = max(length + len(nodes[s]) for length, s in zip(lengths, members, strict=True))
    most = max(packed.first_S1[s + 1] - packed.first_S1[s] for s in members)
    shape = (len(members), most, keys)
    hidden = torch.ones(shape, dtype=torch.bool)
    absent = torch.ones(shape, dtype=torch.bool)
    padded = torch.zeros(shape[:2], dtype=torch.long)
    real = torch.zeros(shape[:2], dtype=torch.bool)
    positions = torch.zeros(shape[:2], dtype=torch.long)
    slots = torch.zeros(shape[0], keys, dtype=torch.long)
    key_positions = torch.zeros(shape[0], keys, dtype=torch.long)
    for b, (s, length) in enumerate(zip(members, lengths, strict=True)):
        rows = [node for node in nodes[s] if node.is_row]
        count, used = len(rows), length + len(nodes[s])
        padded[b, :count] = torch.arange(count) + packed.first_S1[s]
        real[b, :count] = True
        positions[b, :count] = torch.tensor([row.position for row in rows])
        slots[b, :used] = torch.arange(used) + packed.base_S[s]
        key_positions[b, :length] = torch.arange(length)
        key_positions[b, length:used] = torch.tensor([node.position for node in nodes[s]])
        absent[b, :count, :used] = False
        hidden[b, :count, :length] = False
        for i, row in enumerate(rows):
            hidden[b, i, [length + node for node in row.path]] = False
    hidden &= real[..., None]
    absent &= real[..., None]
    distance = positions[..., None] - key_positions[:, None]
    lengths_B11 = torch.tensor(lengths)[:, None, None]
    parts = (padded[real], padded, real, slots, hidden, absent, distance, lengths_B11)
    return _Group(*(part.to(device) for part in parts))
