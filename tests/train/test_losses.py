from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.train import losses
from forerun.train.losses import Head, hard_cross_entropy, soft_cross_entropy


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PIECE", 700)  # 37 rows are several pieces, the last one smaller


def numbers(trained: bool) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    labels_N = torch.randint(-1, 50, (37,), generator=noise)
    return {
        "states_SNC": torch.randn(3, 37, 16, generator=noise).requires_grad_(),
        "weight_UC": torch.randn(50, 16, generator=noise).requires_grad_(trained),
        "teacher_NC": torch.randn(37, 16, generator=noise),
        "teacher_UC": torch.randn(50, 16, generator=noise),
        "weights_SN": torch.rand(3, 37, generator=noise) * (labels_N >= 0),
        "labels_N": labels_N,
    }


def gradients(total: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    trained = [each for each in given.values() if each.requires_grad]
    return list(torch.autograd.grad(2 * total, trained))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_losses_and_gradients_are_those_of_autograd(soft: bool, trained: bool) -> None:
    n = numbers(trained)
    logs_SNU = (n["states_SNC"] @ n["weight_UC"].t()).log_softmax(-1)
    head = Head(n["weight_UC"])
    if soft:
        law_NU = (n["teacher_NC"] @ n["teacher_UC"].t()).softmax(-1)
        wanted_SN = -(law_NU * logs_SNU).sum(-1)
        teacher = Head(n["teacher_UC"])
        found = soft_cross_entropy(
            n["states_SNC"], head, n["teacher_NC"], teacher, n["weights_SN"], n["labels_N"]
        )
    else:
        labels_SN1 = n["labels_N"].clamp(min=0).expand(3, -1)[..., None]
        wanted_SN = -logs_SNU.gather(-1, labels_SN1)[..., 0]
        found = hard_cross_entropy(n["states_SNC"], head, n["weights_SN"], n["labels_N"])
    assert torch.allclose(found.loss_SN, wanted_SN, atol=1e-5)
    assert torch.equal(found.hits_SN, logs_SNU.argmax(-1) == n["labels_N"])
    wanted = (wanted_SN * n["weights_SN"]).sum()
    assert torch.allclose(found.total, wanted)
    for mine, autograd in zip(gradients(found.total, n), gradients(wanted, n), strict=True):
        assert torch.allclose(mine, autograd, atol=1e-4)


def test_a_frozen_head_in_bfloat16_is_close() -> None:
    n = numbers(trained=False)
    states_SNC = n["states_SNC"].detach().bfloat16().requires_grad_()
    exact_SNC = states_SNC.detach().float().requires_grad_()
    weight_UC = n["weight_UC"].bfloat16()
    found = [
        hard_cross_entropy(states, Head(weight), n["weights_SN"], n["labels_N"])
        for states, weight in ((states_SNC, weight_UC), (exact_SNC, weight_UC.float()))
    ]
    assert torch.allclose(found[0].loss_SN, found[1].loss_SN, atol=0.1)
    (mine,) = torch.autograd.grad(found[0].total, states_SNC)
    (exact,) = torch.autograd.grad(found[1].total, exact_SNC)
    assert (mine.float() - exact).norm() < 0.02 * exact.norm()
