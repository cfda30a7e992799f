"""What a decoder computes between its matrix products, in plain PyTorch and compiled.

`Plain` runs anywhere, `Compiled` on processors; both offer the same four methods, and
`make_math` picks one. Numbers agree up to rounding; only `Compiled` gives the rows of a tree
bitwise the values of single steps (see kernels/kernels.c).

R rows, S segments, K keys, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.packing import Packed
from forerun.models.rope import Rope


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What attention needs beside qkv. Norm weights are float32 with the offset added."""

    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    rope: Rope
    window: int  # keys a row sees, its own included; 0: all


class Math(Protocol):
    """The operations of a decoder pass that are not matrix products."""

    def begin(self, packed: Packed, store: KVStore) -> None:
        """Start a pass: what follows is about these rows and this store."""
        ...

    def norm(self, x_RC: Tensor, weight_C: Tensor, residual_RC: Tensor | None = None) -> Tensor:
        """x / rms(x) * weight (+ residual); the weight is float32, offset included."""
        ...

    def attention(self, layer: int, weights: AttentionWeights, qkv_RC: Tensor) -> Tensor:
        """Rotate, store keys and values, attend over each row's own path; [R, H * D]."""
        ...

    def gated(self, gate_up_RC: Tensor) -> Tensor:
        """activation(gate) * up, from rows [gate | up]."""
        ...


def make_math(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Math:
    """The compiled operations where they can run, plain PyTorch elsewhere."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    fits = (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float32)
        and all(size % 16 == 0 for size in sizes)
        and config.head_dim <= kernels.MAX_HEAD
        and config.heads // config.kv_heads <= kernels.MAX_GROUP
    )
    lib = kernels.library() if fits else None
    return Plain(config) if lib is None else Compiled(config, lib)


class Plain:
    """PyTorch only."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.scale = config.attention_scale or config.head_dim**-0.5

    def begin(self, packed: Packed, store: KVStore) -> None:
        self.store = store
        self.rows = packed.rows
        device = store.kv.device
        positions, slots, ancestors = _paths(packed)
        self.positions_R = torch.tensor(positions, device=device)
        self.slots_R = torch.tensor(slots, device=device)
        self.groups = [
            _group(packed, members, self.positions_R, ancestors)
            for members in _similar_segments(packed)
        ]

    def norm(self, x_RC: Tensor, weight_C: Tensor, residual_RC: Tensor | None = None) -> Tensor:
        x32_RC = x_RC.float()
        rms = (x32_RC.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        y_RC = x32_RC * rms * weight_C
        return (y_RC if residual_RC is None else y_RC + residual_RC).to(x_RC.dtype)

    def attention(self, layer: int, weights: AttentionWeights, qkv_RC: Tensor) -> Tensor:
        c = self.config
        qkv_RHD = qkv_RC[: self.rows].unflatten(-1, (-1, c.head_dim)).float()
        q_RHD, k_RGD, v_RGD = qkv_RHD.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        q_RHD = self._rotate(q_RHD, weights.q_norm_D, weights.rope) * self.scale
        k_RGD = self._rotate(k_RGD, weights.k_norm_D, weights.rope)
        keys_GSD, values_GSD = self.store.kv[layer]
        keys_GSD[:, self.slots_R] = k_RGD.transpose(0, 1).to(keys_GSD.dtype)
        values_GSD[:, self.slots_R] = v_RGD.transpose(0, 1).to(values_GSD.dtype)
        out_RC = qkv_RC.new_zeros(len(qkv_RC), c.heads * c.head_dim)
        for group in self.groups:
            out_RC[group.rows_N] = self._attend(group, q_RHD, keys_GSD, values_GSD, weights.window)
        return out_RC

    def gated(self, gate_up_RC: Tensor) -> Tensor:
        gate_RC, up_RC = gate_up_RC.float().chunk(2, dim=-1)
        if self.config.activation == "silu":
            active_RC = functional.silu(gate_RC)
        else:
            active_RC = functional.gelu(gate_RC, approximate="tanh")
        return (active_RC * up_RC).to(gate_up_RC.dtype)

    def _rotate(self, x_RHD: Tensor, norm_D: Tensor | None, rope: Rope) -> Tensor:
        if norm_D is not None:
            x_RHD = self.norm(x_RHD, norm_D)
        cosine_PD, sine_PD = rope.tables(int(self.positions_R.max()) + 1)
        cosine_R1D = cosine_PD[self.positions_R, None]
        sine_R1D = sine_PD[self.positions_R, None]
        a_RHD, b_RHD = x_RHD.chunk(2, dim=-1)
        return torch.cat(
            (a_RHD * cosine_R1D - b_RHD * sine_R1D, b_RHD * cosine_R1D + a_RHD * sine_R1D), dim=-1
        )

    def _attend(
        self, group: _Group, q_RHD: Tensor, keys_GSD: Tensor, values_GSD: Tensor, window: int
    ) -> Tensor:
        """Two batched products with the query heads of a kv head folded into rows."""
        c = self.config
        keys_GBKD = keys_GSD[:, group.slots_BK].float()
        values_GBKD = values_GSD[:, group.slots_BK].float()
        batch, rows = group.padded_BR.shape
        q_BRGHD = q_RHD[group.padded_BR].unflatten(2, (c.kv_heads, -1))
        q_GBMD = q_BRGHD.permute(2, 0, 3, 1, 4).reshape(c.kv_heads, batch, -1, c.head_dim)
        scores_GBMK = q_GBMD @ keys_GBKD.transpose(-1, -2)
        if c.attention_softcap:
            scores_GBMK = c.attention_softcap * torch.tanh(scores_GBMK / c.attention_softcap)
        hidden_BRK = group.hidden(window).repeat(1, c.heads // c.kv_heads, 1)
        weights_GBMK = scores_GBMK.masked_fill(hidden_BRK, -torch.inf).softmax(-1)
        out_GBMD = weights_GBMK @ values_GBKD
        out_GBHRD = out_GBMD.unflatten(2, (-1, rows))
        out_BRC = out_GBHRD.permute(1, 3, 0, 2, 4).reshape(batch, rows, -1)
        return out_BRC[group.real_BR].to(keys_GSD.dtype)


@dataclass(frozen=True, slots=True)
class _Group:
    """B segments of similar size, padded to the same number of rows and keys."""

    rows_N: Tensor  # the group's rows
    padded_BR: Tensor  # the same with row 0 of the pass as padding
    real_BR: Tensor  # where padded_BR is no padding
    slots_BK: Tensor
    hidden_BRK: Tensor  # keys that are not on a row's path
    distance_BRK: Tensor  # row position - key position

    def hidden(self, window: int) -> Tensor:
        """Keys that a row must not see. Padding rows see all: a softmax needs something."""
        if not window:
            return self.hidden_BRK
        return (self.hidden_BRK | (self.distance_BRK >= window)) & self.real_BR[..., None]


BIG = 64  # segments with more rows are attended alone: padding small ones to them would be waste


def _similar_segments(packed: Packed) -> list[list[int]]:
    sizes = [b - a for a, b in zip(packed.first_S1, packed.first_S1[1:], strict=False)]
    small = [s for s, size in enumerate(sizes) if size <= BIG]
    big = [[s] for s, size in enumerate(sizes) if size > BIG]
    return ([small] if small else []) + big


def _paths(packed: Packed) -> tuple[list[int], list[int], list[list[int]]]:
    """Per row: its position, its slot, and the rows of its segment on its path (itself last)."""
    positions: list[int] = []
    slots: list[int] = []
    paths: list[list[int]] = []
    for s, (base, length) in enumerate(zip(packed.base_S, packed.length_S, strict=True)):
        first = packed.first_S1[s]
        for i, parent in enumerate(packed.parent_R[first : packed.first_S1[s + 1]]):
            path = [i] if parent < 0 else [*paths[first + parent], i]
            paths.append(path)
            positions.append(length + len(path) - 1)
            slots.append(base + length + i)
    return positions, slots, paths


def _group(
    packed: Packed, members: list[int], positions_R: Tensor, paths: list[list[int]]
) -> _Group:
    device = positions_R.device
    begins = [packed.first_S1[s] for s in members]
    counts = [packed.first_S1[s + 1] - packed.first_S1[s] for s in members]
    lengths = [packed.length_S[s] for s in members]
    keys = max(length + count for length, count in zip(lengths, counts, strict=True))
    shape = (len(members), max(counts), keys)
    hidden = torch.ones(shape, dtype=torch.bool)
    padded = torch.zeros(shape[:2], dtype=torch.long)
    real = torch.zeros(shape[:2], dtype=torch.bool)
    slots = torch.zeros(shape[0], keys, dtype=torch.long)
    key_positions = torch.zeros(shape[0], keys, dtype=torch.long)
    positions = positions_R.cpu()
    for b, (begin, count, length) in enumerate(zip(begins, counts, lengths, strict=True)):
        padded[b, :count] = torch.arange(begin, begin + count)
        real[b, :count] = True
        used = length + count
        slots[b, :used] = torch.arange(used) + packed.base_S[members[b]]
        key_positions[b, :length] = torch.arange(length)
        key_positions[b, length:used] = positions[begin : begin + count]
        hidden[b, :count, :length] = False
        for i in range(count):
            hidden[b, i, [length + ancestor for ancestor in paths[begin + i]]] = False
    hidden &= real[..., None]
    distance = positions[padded][..., None] - key_positions[:, None]
    rows = padded[real]
    return _Group(*(t.to(device) for t in (rows, padded, real, slots, hidden, distance)))


class Compiled:
    """The operations of kernels/kernels.c. Tensors are handed over as addresses."""

    def __init__(self, config: DecoderConfig, lib: ctypes.CDLL) -> None:
        self.config = config
        self.lib = lib
        self.gelu = int(config.activation == "gelu_tanh")
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.layers: dict[int, kernels.Layer] = {}  # addresses in `store`, tables up to `covered`
        self.store: KVStore | None = None
        self.covered = 0

    def begin(self, packed: Packed, store: KVStore) -> None:
        c = self.config
        if store is not self.store or packed.positions > self.covered:
            self.layers.clear()
            self.store, self.covered = store, 2 * packed.positions
        self.scratch = torch.empty(packed.rows * (c.heads * c.head_dim + 2))
        ints = self.scratch.data_ptr() + packed.rows * c.heads * c.head_dim * 4
        self.packed = packed  # keeps the arrays alive that `self.batch` points into
        self.batch = kernels.Pass(
            packed.rows,
            len(packed.base_S),
            packed.base_S.buffer_info()[0],
            packed.length_S.buffer_info()[0],
            packed.first_S1.buffer_info()[0],
            packed.parent_R.buffer_info()[0],
            ints,
            ints + packed.rows * 4,
            self.scratch.data_ptr(),
        )
        self.batch_address = ctypes.addressof(self.batch)
        self.lib.prepare(self.batch_address)

    def norm(self, x_RC: Tensor, weight_C: Tensor, residual_RC: Tensor | None = None) -> Tensor:
        out_RC = torch.empty_like(x_RC)
        self.lib.rms_norm(
            x_RC.data_ptr(),
            weight_C.data_ptr(),
            None if residual_RC is None else residual_RC.data_ptr(),
            out_RC.data_ptr(),
            *x_RC.shape,
            self.config.norm_eps,
            x_RC.dtype is torch.bfloat16,
        )
        return out_RC

    def attention(self, layer: int, weights: AttentionWeights, qkv_RC: Tensor) -> Tensor:
        c = self.config
        known = self.layers.get(layer)
        if known is None:
            assert self.store is not None, "attention outside a pass"
            known = self.layers[layer] = self._layer(self.store, layer, weights)
        out_RC = qkv_RC.new_zeros(len(qkv_RC), c.heads * c.head_dim)
        self.lib.attention(
            self.batch_address, ctypes.addressof(known), qkv_RC.data_ptr(), out_RC.data_ptr()
        )
        return out_RC

    def gated(self, gate_up_RC: Tensor) -> Tensor:
        rows, width = gate_up_RC.shape
        out_RC = gate_up_RC.new_empty(rows, width // 2)
        self.lib.gated(
            gate_up_RC.data_ptr(),
            out_RC.data_ptr(),
            rows,
            width // 2,
            self.gelu,
            gate_up_RC.dtype is torch.bfloat16,
        )
        return out_RC

    def _layer(self, store: KVStore, layer: int, weights: AttentionWeights) -> kernels.Layer:
        c = self.config
        keys, values = store.kv[layer]
        cosine_PD, sine_PD = weights.rope.tables(self.covered)
        q_norm, k_norm = weights.q_norm_D, weights.k_norm_D
        return kernels.Layer(
            store.kv.dtype is torch.bfloat16,
            c.heads,
            c.kv_heads,
            c.head_dim,
            store.slots,
            keys.data_ptr(),
            values.data_ptr(),
            cosine_PD.data_ptr(),
            sine_PD.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            c.norm_eps,
            self.scale,
            c.attention_softcap or 0.0,
            weights.window,
        )
