"""Cross-entropy over a vocabulary without the logits: row piece by row piece, with its gradient.

The logits of a batch are a hundred times larger than its states. Here a piece of them exists at a
time, small enough for the processor's cache; gradients are computed on the spot and kept, since the
loss is a weighted sum whose weights are known.

S predictions per row (unroll steps, heads, slots), N rows, C hidden size, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.linear import Linear, can_pack

PIECE = 2**19  # logits at a time
ROWS = 16  # but never fewer rows: each piece reads the whole of the output matrix


class Head:
    """An output matrix, trained if it requires a gradient; a frozen one is laid out for speed.

    Make a frozen one once, a trained one in every step. Its type is that of the products.
    """

    def __init__(self, weight_UC: Tensor) -> None:
        self.weight_UC = weight_UC
        self._forth: Linear | None = None
        if not weight_UC.requires_grad and can_pack(weight_UC):
            self._forth, self._back = Linear(weight_UC), Linear(weight_UC.t().contiguous())

    def logits(self, states_NC: Tensor) -> Tensor:
        """[N, U]."""
        if self._forth:
            return self._forth(states_NC)
        return functional.linear(states_NC, self.weight_UC)

    def back(self, gradient_NU: Tensor) -> Tensor:
        """The gradient of the states, [N, C]."""
        return self._back(gradient_NU) if self._forth else gradient_NU @ self.weight_UC


@dataclass(frozen=True, slots=True)
class RowLosses:
    """total: the weighted sum of all, with a gradient. loss_SN, hits_SN: of each prediction, for
    reports: its cross-entropy, and whether its likeliest token is the label."""

    total: Tensor
    loss_SN: Tensor
    hits_SN: Tensor


def soft_cross_entropy(
    states_SNC: Tensor,
    head: Head,
    teacher_NC: Tensor,
    teacher_head: Head,
    weights_SN: Tensor,
    labels_N: Tensor,
) -> RowLosses:
    """Against the law that the teacher's logits over the same U tokens give.

    All S predictions of a row are compared with the one law of the row. labels_N: for the hits
    alone; -1 where the token is not among the U.
    """
    return _apply(states_SNC, head, (teacher_NC, teacher_head), weights_SN, labels_N)


def hard_cross_entropy(
    states_SNC: Tensor, head: Head, weights_SN: Tensor, labels_N: Tensor
) -> RowLosses:
    """Against one token per row; where it is not among the U (-1), the weight must be 0."""
    return _apply(states_SNC, head, None, weights_SN, labels_N)


def _apply(
    states_SNC: Tensor,
    head: Head,
    teacher: tuple[Tensor, Head] | None,
    weights_SN: Tensor,
    labels_N: Tensor,
) -> RowLosses:
    apply: Any = _CrossEntropy.apply
    return RowLosses(*apply(states_SNC, head.weight_UC, head, teacher, weights_SN, labels_N))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_SNC: Tensor,
        weight_UC: Tensor,
        head: Head,
        teacher: tuple[Tensor, Head] | None,
        weights_SN: Tensor,
        labels_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, rows, _ = states_SNC.shape
        wanted_states, wanted_weight = ctx.needs_input_grad[:2]
        loss_SN = weights_SN.new_empty(count, rows, dtype=torch.float32)
        hits_SN = weights_SN.new_empty(count, rows, dtype=torch.bool)
        gradient_SNC = torch.empty_like(states_SNC) if wanted_states else None
        gradient_UC = torch.zeros_like(weight_UC) if wanted_weight else None
        size = max(ROWS, PIECE // (len(weight_UC) * count))
        for begin in range(0, rows, size):
            piece = slice(begin, begin + size)
            states_MC = states_SNC[:, piece].flatten(0, 1)
            logits_SnU = head.logits(states_MC).float().unflatten(0, (count, -1))
            labels_n = labels_N[piece]
            top_Sn1, found_Sn1 = logits_SnU.max(-1, keepdim=True)
            hits_SN[:, piece] = found_Sn1[..., 0] == labels_n
            law_SnU = logits_SnU.softmax(-1)
            sums_Sn = (top_Sn1 - law_SnU.gather(-1, found_Sn1).log())[..., 0]  # log of the sum
            if teacher is None:
                labels_Sn1 = labels_n.clamp(min=0).expand(count, -1)[..., None]
                expected_Sn = logits_SnU.gather(-1, labels_Sn1)[..., 0]
                law_SnU.scatter_add_(-1, labels_Sn1, -torch.ones_like(top_Sn1))
            else:
                states_NC, teacher_head = teacher
                wanted_nU = teacher_head.logits(states_NC[piece]).float().softmax(-1)
                expected_Sn = (logits_SnU.mul_(wanted_nU)).sum(-1)
                law_SnU.sub_(wanted_nU)
            loss_SN[:, piece] = sums_Sn - expected_Sn
            if not (wanted_states or wanted_weight):
                continue
            law_SnU.mul_(weights_SN[:, piece, None])
            gradient_MU = law_SnU.flatten(0, 1).to(states_SNC.dtype)
            if gradient_SNC is not None:
                back_MC = head.back(gradient_MU)
                gradient_SNC[:, piece] = back_MC.unflatten(0, (count, -1))
            if gradient_UC is not None:
                gradient_UC += gradient_MU.t() @ states_MC
        ctx.gradients = gradient_SNC, gradient_UC
        ctx.mark_non_differentiable(loss_SN, hits_SN)
        return (loss_SN * weights_SN).sum(), loss_SN, hits_SN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        scaled = (None if each is None else each * scale.to(each.dtype) for each in ctx.gradients)
        return (*scaled, None, None, None, None)
