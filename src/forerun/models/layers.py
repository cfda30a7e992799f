"""The layers of a decoder: their weights, and what computes them.

Two backends offer the same methods: `Compiled` on processors with a C compiler, `Plain`
anywhere. Numbers agree up to rounding; only `Compiled` gives the rows of a tree bitwise the values
of single steps (see kernels/kernels.h).

R rows, C hidden size, H heads, G kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.packing import Packed
from forerun.models.rope import Rope

Matrix = Any  # a weight as its backend lays it out


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and gated MLP, each behind a norm, each added to the residual stream.

    Norm weights are float32 with the offset added; those behind attention and MLP exist in
    sandwich-normed models only, and some draft layers have none before attention.
    """

    index: int
    qkv: Matrix  # [(H + 2 G) D, C], rows q, k, v
    o: Matrix
    gate_up: Matrix  # rows gate, up
    down: Matrix
    rope: Rope
    window: int  # keys a row sees, its own included; 0: all
    before_attention_C: Tensor | None
    before_mlp_C: Tensor
    after_attention_C: Tensor | None = None
    after_mlp_C: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    # Of draft layers:
    beside_C: Tensor | None = None  # norm of a second input; qkv reads [beside | hidden]
    normed_residual: bool = False  # the residual starts behind the norm before attention
    both_ways: bool = False  # rows see those behind them, too; segments must be chains
    anchored: bool = False  # windows end `window` before the first node, not before each row


class Backend(Protocol):
    """Computes layers over the rows of one pass at a time."""

    def matrix(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Matrix:
        """Lay a weight out; the tensor itself need not be kept."""
        ...

    def begin(self, packed: Packed, store: KVStore) -> None:
        """Start a pass: what follows is about these rows and this store."""
        ...

    def run(
        self, hidden_RC: Tensor, layers: Sequence[Layer], beside_RC: Tensor | None = None
    ) -> Tensor:
        """The residual stream behind these layers; their keys and values go to the store.

        hidden_RC may be overwritten. Rows behind those of the pass are padding. beside_RC: the
        second input of layers that have one.
        """
        ...

    def run_tapped(
        self, hidden_RC: Tensor, layers: Sequence[Layer], taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the residual stream [R, T, C] at some boundaries; boundary i lies before
        layer i of those that are run."""
        ...

    def append(self, x_RC: Tensor, layers: Sequence[Layer]) -> None:
        """Put the keys and values of the rows into the store; every layer makes them of x_RC as it
        is, and nothing is attended."""
        ...

    def linear(self, x_NI: Tensor, matrix: Matrix) -> Tensor:
        """One product, [N, O]."""
        ...

    def norm(self, x_NC: Tensor, weight_C: Tensor) -> Tensor:
        """The norm of the layers, [N, C]."""
        ...

    def add_silu(self, x_NC: Tensor, y_NC: Tensor) -> Tensor:
        """x + SiLU(y), [N, C]. Rows of y may lie apart from each other."""
        ...

    def logits(self, hidden_NC: Tensor, norm_C: Tensor | None, head: Matrix) -> Tensor:
        """Final norm, unless it is None, and head: [N, V], float32."""
        ...

    def rank(
        self, hidden_NC: Tensor, norm_C: Tensor | None, head: Matrix, top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The columns of the `top_k` largest logits of each row, best first, and their shares in a
        softmax over all."""
        ...


def make_backend(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, *widths: int
) -> Backend:
    """The compiled layers where they can run, plain PyTorch elsewhere.

    widths: of what else will be multiplied or normed.
    """
    from forerun.models.compiled import Compiled
    from forerun.models.plain import Plain

    sizes = (config.head_dim, config.hidden_size, config.intermediate_size, *widths)
    fits = (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float32)
        and all(size % kernels.LANES == 0 for size in sizes)
        and config.head_dim <= kernels.MAX_HEAD
        and config.heads // config.kv_heads <= kernels.MAX_GROUP
    )
    lib = kernels.library() if fits else None
    return Plain(config) if lib is None else Compiled(config, dtype, lib)
