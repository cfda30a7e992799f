"""The layers of a decoder in compiled code (kernels/kernels.c). Tensors go over as addresses."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.layers import Layer
from forerun.models.packing import Packed


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight in blocks of 32 outputs, and the tensors that its addresses point into."""

    weight: Tensor
    bias_O: Tensor | None
    address: kernels.Matrix


class Compiled:
    """float32 and bfloat16 on processors."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
        self.config = config
        self.lib = lib
        self.dtype = dtype
        self.bf16 = dtype is torch.bfloat16
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.rows = 0  # that the scratch tensors have room for
        # Of the last pass, and weak: a model outlives its stores, which are large.
        self.store: Callable[[], KVStore | None] = lambda: None
        self.positions = 0  # that the rotary tables of `addresses` cover
        self.addresses: dict[int, kernels.Layer] = {}  # per layer, for `store` and `positions`

    def matrix(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedMatrix:
        inputs = weight_OI.shape[1]
        padding = -len(weight_OI) % kernels.COLUMNS
        blocked = functional.pad(weight_OI, (0, 0, 0, padding)).unflatten(0, (-1, kernels.COLUMNS))
        if self.bf16:
            weight = blocked.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
        else:
            weight = blocked.transpose(1, 2).contiguous()
        bias = None if bias_O is None else bias_O.float().contiguous()
        outputs = -(-len(weight_OI) // kernels.LANES) * kernels.LANES  # whole vectors are written
        address = kernels.Matrix(weight.data_ptr(), _address(bias), inputs, outputs)
        return PackedMatrix(weight, bias, address)

    def begin(self, packed: Packed, store: KVStore) -> None:
        if store is not self.store() or packed.positions > self.positions:
            self.addresses.clear()
            self.store, self.positions = weakref.ref(store), 2 * packed.positions
        if packed.rows > self.rows:
            self._grow(packed.rows)
        self.packed = packed  # keeps the arrays alive that `batch` points into
        self.batch = kernels.Pass(
            packed.rows,
            len(packed.base_S),
            packed.base_S.buffer_info()[0],
            packed.length_S.buffer_info()[0],
            packed.first_S1.buffer_info()[0],
            packed.parent_R.buffer_info()[0],
            self.ints.data_ptr(),
            self.ints.data_ptr() + 4 * packed.rows,
            self.query.data_ptr(),
            self.narrow.data_ptr(),
            self.wide.data_ptr(),
        )
        self.lib.prepare(ctypes.byref(self.batch))

    def run(self, hidden_RC: Tensor, layers: Sequence[Layer]) -> Tensor:
        addresses = (ctypes.POINTER(kernels.Layer) * len(layers))(
            *(ctypes.pointer(self._address_of(layer)) for layer in layers)
        )
        self.lib.run(ctypes.byref(self.batch), addresses, len(layers), hidden_RC.data_ptr())
        return hidden_RC

    def logits(self, hidden_NC: Tensor, norm_C: Tensor | None, head: PackedMatrix) -> Tensor:
        logits_NV = torch.empty(len(hidden_NC), head.address.out)
        normed_NC = torch.empty_like(hidden_NC)
        self.lib.logits(
            hidden_NC.data_ptr(),
            _address(norm_C),
            self.config.norm_eps,
            ctypes.byref(head.address),
            normed_NC.data_ptr(),
            logits_NV.data_ptr(),
            len(hidden_NC),
            self.bf16,
        )
        return logits_NV[:, : self.config.vocab_size].contiguous()

    def _grow(self, rows: int) -> None:
        c = self.config
        heads = c.heads * c.head_dim
        narrow = max(c.hidden_size, heads, c.intermediate_size)
        wide = max(heads + 2 * c.kv_heads * c.head_dim, 2 * c.intermediate_size, c.hidden_size)
        self.rows = rows
        self.ints = torch.empty(2 * rows, dtype=torch.int32)
        self.query = torch.empty(rows * heads)
        self.narrow = torch.empty(rows * narrow, dtype=self.dtype)
        self.wide = torch.empty(rows * wide, dtype=self.dtype)

    def _address_of(self, layer: Layer) -> kernels.Layer:
        known = self.addresses.get(layer.index)
        if known is None:
            store = self.store()
            assert store is not None, "layers outside a pass"
            known = self.addresses[layer.index] = self._locate(layer, store)
        return known

    def _locate(self, layer: Layer, store: KVStore) -> kernels.Layer:
        c = self.config
        keys, values = store.kv[layer.index]
        cosine_PD, sine_PD = layer.rope.tables(self.positions)
        return kernels.Layer(
            self.bf16,
            c.heads,
            c.kv_heads,
            c.head_dim,
            store.slots,
            keys.data_ptr(),
            values.data_ptr(),
            cosine_PD.data_ptr(),
            sine_PD.data_ptr(),
            _address(layer.q_norm_D),
            _address(layer.k_norm_D),
            c.norm_eps,
            self.scale,
            c.attention_softcap or 0.0,
            layer.window,
            c.activation == "gelu_tanh",
            layer.qkv.address,
            layer.o.address,
            layer.gate_up.address,
            layer.down.address,
            _address(layer.before_attention_C),
            _address(layer.after_attention_C),
            _address(layer.before_mlp_C),
            _address(layer.after_mlp_C),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
