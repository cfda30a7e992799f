"""Root mean square norm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x_RC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, computed in float32 and given back in the type of x."""
    return normed(x_RC, weight_C, eps).to(x_RC.dtype)


def normed(x_RC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """The same before it is rounded, float32."""
    x32_RC = x_RC.float()
    rms_R1 = (x32_RC.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x32_RC * rms_R1 * weight_C
