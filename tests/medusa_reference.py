"""Medusa heads, literal and slow: the formulas of the paper (arXiv 2401.10774, section 2.1.1), one
number at a time where it can be, on tensors by their published names.

    h      the last hidden state of the target, behind its final norm
    r      h, then r + SiLU(W r + b) for each residual layer
    y      U r, the logits of the token k + 2 places behind the one that h belongs to
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def final_norm(x_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    rms = math.sqrt(sum(float(x) ** 2 for x in x_C) / len(x_C) + eps)
    return torch.tensor([float(x) / rms * float(w) for x, w in zip(x_C, weight_C, strict=True)])


def head_logits(
    h_C: Tensor, tensors: Mapping[str, Tensor], head: int, layers: int, target_head_VC: Tensor
) -> Tensor:
    """Of one head, from tensors named as in the authors' files."""
    r_C = h_C
    for j in range(layers):
        y_C = tensors[f"{head}.{j}.linear.weight"] @ r_C + tensors[f"{head}.{j}.linear.bias"]
        r_C = torch.tensor([float(r) + silu(float(y)) for r, y in zip(r_C, y_C, strict=True)])
    return tensors.get(f"{head}.{layers}.weight", target_head_VC) @ r_C
