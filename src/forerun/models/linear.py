"""Matrix products with weights that never change: y = x W^T + b."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_LINEAR = torch.ops.mkldnn._linear_pointwise


class Linear:
    """A linear layer whose weight is laid out once for the device it runs on.

    On processors that multiply bfloat16, oneDNN's own weight layout halves the time of a few rows:
    `F.linear` would convert the layout again in every call. Elsewhere it is `F.linear`.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.bias_O = bias_O
        self.packed = can_pack(weight_OI)
        # The row count is a hint; the layout serves all of them.
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI, 8) if self.packed else weight_OI
        )

    def __call__(self, x_RI: Tensor, residual_RO: Tensor | None = None) -> Tensor:
        """x W^T + b, plus the residual if there is one."""
        if not self.packed:
            plain_RO = functional.linear(x_RI, self.weight, self.bias_O)
            return plain_RO if residual_RO is None else plain_RO + residual_RO
        y_RO: Tensor
        if residual_RO is None:
            y_RO = _LINEAR(x_RI, self.weight, self.bias_O, "none", [], "")
        else:
            y_RO = _LINEAR.binary(x_RI, residual_RO, self.weight, self.bias_O, "add")
        return y_RO


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this weight natively on this machine."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
