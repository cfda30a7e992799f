"""The layers of a decoder in compiled code (kernels/). Tensors go over as addresses."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.layers import Layer
from forerun.models.packing import Packed
from forerun.models.pages import Pages


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight in blocks of 32 outputs, and the tensors that its addresses point into."""

    weight: Tensor
    bias_O: Tensor | None
    outputs: int  # of them, in front of the padding that `address` counts
    address: kernels.Matrix


class Compiled:
    """float32 and bfloat16 on processors."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, lib: ctypes.CDLL) -> None:
        self.config = config
        self.lib = lib
        self.build = Path(lib._name).stem  # another one for other sources, compilers, processors
        self.dtype = dtype
        self.bf16 = dtype is torch.bfloat16
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.pages = Pages()  # of the weights
        self.rows = self.nodes = 0  # that the scratch tensors have room for
        # Of the last pass, and weak: a model outlives its stores, which are large.
        self.store: Callable[[], KVStore | None] = lambda: None
        self.ranking: _Ranking | None = None
        self.positions = 0  # that the rotary tables of `addresses` cover
        self.addresses: dict[int, kernels.Layer] = {}  # per layer, for `store` and `positions`
        self.runs: dict[tuple[int, ...], ctypes.Array[Any]] = {}  # addresses of layers run together

    def matrix(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedMatrix:
        inputs = weight_OI.shape[1]
        padding = -len(weight_OI) % kernels.COLUMNS
        blocked = functional.pad(weight_OI, (0, 0, 0, padding)).unflatten(0, (-1, kernels.COLUMNS))
        if self.bf16:
            weight = self.pages.keep(blocked.unflatten(2, (-1, 2)).transpose(1, 2))
        else:
            weight = self.pages.keep(blocked.transpose(1, 2))
        bias = None if bias_O is None else functional.pad(bias_O.float(), (0, padding))
        outputs = -(-len(weight_OI) // kernels.LANES) * kernels.LANES  # whole vectors are written
        matrix = kernels.Matrix(weight.data_ptr(), address(bias), inputs, outputs)
        return PackedMatrix(weight, bias, len(weight_OI), matrix)

    def begin(self, packed: Packed, store: KVStore) -> None:
        self._locate_in(store, packed.positions)
        nodes = len(packed.parent_N)
        if packed.rows > self.rows or nodes > self.nodes:
            self._grow(packed.rows, nodes)
        self.packed = packed  # keeps the arrays alive that `batch` points into
        self.batch = kernels.Pass(
            packed.rows,
            len(packed.base_S),
            packed.base_S.buffer_info()[0],
            packed.length_S.buffer_info()[0],
            packed.first_S1.buffer_info()[0],
            packed.node_S1.buffer_info()[0],
            packed.parent_N.buffer_info()[0],
            self.ints.data_ptr(),
            self.ints.data_ptr() + 4 * nodes,
            self.query.data_ptr(),
            self.narrow.data_ptr(),
            self.wide.data_ptr(),
        )
        self.lib.prepare(ctypes.byref(self.batch))

    def run(
        self, hidden_RC: Tensor, layers: Sequence[Layer], beside_RC: Tensor | None = None
    ) -> Tensor:
        self._run(hidden_RC, layers, beside_RC, None)
        return hidden_RC

    def run_tapped(
        self, hidden_RC: Tensor, layers: Sequence[Layer], taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        rows, size = hidden_RC.shape
        taps_RTC = torch.empty(rows, len(taps), size, dtype=self.dtype)
        boundaries = array("i", taps)
        where = kernels.Taps(len(taps), boundaries.buffer_info()[0], taps_RTC.data_ptr())
        self._run(hidden_RC, layers, None, where)
        return hidden_RC, taps_RTC

    def _run(
        self,
        hidden_RC: Tensor,
        layers: Sequence[Layer],
        beside_RC: Tensor | None,
        taps: kernels.Taps | None,
    ) -> None:
        """In place on hidden_RC."""
        self.lib.run(
            ctypes.byref(self.batch),
            self._addresses(layers),
            len(layers),
            address(beside_RC),
            hidden_RC.data_ptr(),
            None if taps is None else ctypes.byref(taps),
        )

    def append(self, x_RC: Tensor, layers: Sequence[Layer]) -> None:
        self.lib.append(
            ctypes.byref(self.batch), self._addresses(layers), len(layers), x_RC.data_ptr()
        )

    def linear(self, x_NI: Tensor, matrix: PackedMatrix) -> Tensor:
        out_NO = torch.empty(len(x_NI), matrix.address.out, dtype=self.dtype)
        self.lib.linear(
            ctypes.byref(matrix.address),
            x_NI.data_ptr(),
            out_NO.data_ptr(),
            len(x_NI),
            self.bf16,
        )
        return out_NO[:, : matrix.outputs].contiguous()

    def norm(self, x_NC: Tensor, weight_C: Tensor) -> Tensor:
        rows, size = x_NC.shape
        out_NC = torch.empty_like(x_NC)
        self.lib.norm(
            x_NC.data_ptr(),
            weight_C.data_ptr(),
            self.config.norm_eps,
            out_NC.data_ptr(),
            rows,
            size,
            self.bf16,
        )
        return out_NC

    def add_silu(self, x_NC: Tensor, y_NC: Tensor) -> Tensor:
        x_NC = x_NC.contiguous()
        rows, size = x_NC.shape
        assert y_NC.stride(1) == 1, "columns lie side by side"
        out_NC = torch.empty_like(x_NC)
        self.lib.add_silu(
            x_NC.data_ptr(),
            y_NC.data_ptr(),
            y_NC.stride(0),
            out_NC.data_ptr(),
            rows,
            size,
            self.bf16,
        )
        return out_NC

    def logits(self, hidden_NC: Tensor, norm_C: Tensor | None, head: PackedMatrix) -> Tensor:
        rows, outputs = hidden_NC.shape[0], head.address.out
        logits_NV = torch.empty(rows, outputs)
        normed_NC = torch.empty_like(hidden_NC)
        self.lib.logits(
            hidden_NC.data_ptr(),
            address(norm_C),
            self.config.norm_eps,
            ctypes.byref(head.address),
            normed_NC.data_ptr(),
            logits_NV.data_ptr(),
            rows,
            self.bf16,
        )
        if head.outputs == outputs:
            return logits_NV
        return logits_NV[:, : head.outputs].contiguous()

    def rank(
        self, hidden_NC: Tensor, norm_C: Tensor | None, head: PackedMatrix, top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        rows, (inputs, outputs) = len(hidden_NC), (head.address.in_, head.address.out)
        if self.ranking is None or not self.ranking.fits(rows, inputs, outputs, top_k):
            self.ranking = _Ranking(rows, inputs, outputs, top_k)
        scratch = self.ranking
        self.lib.rank(
            hidden_NC.data_ptr(),
            address(norm_C),
            self.config.norm_eps,
            ctypes.byref(head.address),
            scratch.normed.data_ptr(),
            scratch.scores.data_ptr(),
            rows,
            self.bf16,
            head.outputs,
            top_k,
            scratch.columns,
            scratch.shares,
        )
        columns, shares = scratch.columns[: rows * top_k], scratch.shares[: rows * top_k]
        begins = range(0, rows * top_k, top_k)
        return [columns[i : i + top_k] for i in begins], [shares[i : i + top_k] for i in begins]

    def addresses_in(
        self, store: KVStore, positions: int, layers: Sequence[Layer]
    ) -> ctypes.Array[Any]:
        """Where layers with their keys and values in this store lie, for passes up to so many
        positions; valid until the next pass."""
        self._locate_in(store, positions)
        return self._addresses(layers)

    def _locate_in(self, store: KVStore, positions: int) -> None:
        if store is not self.store() or positions > self.positions:
            self.addresses.clear()
            self.runs.clear()
            self.store, self.positions = weakref.ref(store), 2 * positions

    def _grow(self, rows: int, nodes: int) -> None:
        c = self.config
        rows, nodes = max(rows, self.rows), max(nodes, self.nodes)
        heads = c.heads * c.head_dim
        narrow = max(2 * c.hidden_size, heads, c.intermediate_size)
        wide = max(heads + 2 * c.kv_heads * c.head_dim, 2 * c.intermediate_size, c.hidden_size)
        self.rows, self.nodes = rows, nodes
        self.ints = torch.empty(2 * nodes, dtype=torch.int32)
        self.query = torch.empty(rows * heads)
        self.narrow = torch.empty(rows * narrow, dtype=self.dtype)
        self.wide = torch.empty(rows * wide, dtype=self.dtype)

    def _addresses(self, layers: Sequence[Layer]) -> ctypes.Array[Any]:
        indices = tuple([layer.index for layer in layers])
        known = self.runs.get(indices)
        if known is None:
            pointers = [ctypes.pointer(self._address_of(layer)) for layer in layers]
            known = (ctypes.POINTER(kernels.Layer) * len(layers))(*pointers)
            self.runs[indices] = known
        return known

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
            address(layer.q_norm_D),
            address(layer.k_norm_D),
            c.norm_eps,
            self.scale,
            c.attention_softcap or 0.0,
            layer.window,
            layer.anchored,
            layer.both_ways,
            c.activation == "gelu_tanh",
            layer.qkv.address,
            layer.o.address,
            layer.gate_up.address,
            layer.down.address,
            address(layer.before_attention_C),
            address(layer.after_attention_C),
            address(layer.before_mlp_C),
            address(layer.after_mlp_C),
            address(layer.beside_C),
            layer.normed_residual,
        )


class _Ranking:
    """Scratch of `rank`: fresh tensors would cost more than the ranking."""

    def __init__(self, rows: int, inputs: int, outputs: int, top_k: int) -> None:
        self.normed = torch.empty(rows * inputs)
        self.scores = torch.empty(rows * outputs)
        self.columns = (ctypes.c_int64 * (rows * top_k))()
        self.shares = (ctypes.c_float * (rows * top_k))()

    def fits(self, rows: int, inputs: int, outputs: int, top_k: int) -> bool:
        return (
            rows * inputs <= len(self.normed)
            and rows * outputs <= len(self.scores)
            and rows * top_k <= len(self.columns)
        )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
