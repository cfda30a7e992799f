from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import drafting
from drafting import request
from forerun.core import Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.medusa import Medusa
from forerun.errors import ConfigError
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel, load
from forerun.train.capture import Batch, Capture
from forerun.train.objectives import OBJECTIVES
from forerun.train.objectives.base import Loss
from forerun.train.objectives.medusa import Medusa1, MedusaSettings
from forerun.train.objectives.medusa2 import Medusa2, Medusa2Settings
from forerun.train.vocabulary import Vocabulary, full
from learned_dflash import taps_of
from tiny import VOCAB, tiny_folder, tiny_llama
from training import answers, text

TEXTS = [text((5, 12), length=12, seed=1), text((0, 9), length=9, seed=2)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


def objective(target: LoadedModel, **values: Any) -> Medusa2:
    numbers = torch.Generator().manual_seed(0)
    return Medusa2(Medusa2Settings(**{"rank": 4, **values}), target, full(VOCAB), numbers)


def randomised(trained: Medusa2) -> Medusa2:
    noise = torch.Generator().manual_seed(3)
    for parameter in trained.network.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=noise) * 0.1
    return trained


def capture(trained: Medusa2) -> Batch:
    return Capture(trained.target, ())(TEXTS)


def loss_at(done: float, trained: Medusa2, batch: Batch) -> Loss:
    trained.done = done
    return trained.loss(batch, torch.Generator())


# ---- what is taught -----------------------------------------------------------------------------


def literal_loss(trained: Medusa2, batch: Batch, fidelity: float) -> Tensor:
    """Token by token, with the whole of the logits: the model, then head by head."""
    head, heads = trained.target.head_logits, trained.network.heads
    states_BRC = trained.network.backbone(batch.tokens_BR)
    matrix_VC = head(torch.eye(32)).T
    total, count = torch.zeros(()), 0.0
    for b, length in enumerate(batch.lengths_B.tolist()):
        laws_RV = head(batch.final_BRC[b]).softmax(-1)
        logits_RKV = torch.stack(
            [states_BRC[b] @ matrix_VC.T]
            + [block(states_BRC[b]) @ matrix_VC.T for block in heads.blocks],
            1,
        )
        for row in range(length - 1):
            if not batch.supervised_BR[b, row + 1]:
                continue
            for reach, weight in enumerate([fidelity, 1.0, 0.8, 0.8**2, 0.8**3]):
                if reach <= row:
                    said_V = logits_RKV[row - reach, reach].log_softmax(-1)
                    total = total - weight * (laws_RV[row] * said_V).sum()
                    count += weight
    return total / count


def test_both_learn_the_law_of_the_original(target: LoadedModel) -> None:
    trained = randomised(objective(target, fidelity=3.0))
    batch = capture(trained)
    found = loss_at(0.5, trained, batch).total
    torch.testing.assert_close(found, literal_loss(trained, batch, 3.0))
    assert (found - literal_loss(trained, batch, 1.0)).abs() > 0.01, "blind to the weight"
    learned = [p for p in trained.network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(found, learned)
    expected = torch.autograd.grad(literal_loss(trained, batch, 3.0), learned)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_in_the_first_stage_the_heads_learn_as_in_medusa_1(target: LoadedModel) -> None:
    trained = randomised(objective(target))
    batch = capture(trained)
    alone = Medusa1(MedusaSettings(), target, full(VOCAB), torch.Generator())
    alone.network.blocks.load_state_dict(trained.network.heads.blocks.state_dict())
    found = loss_at(0.49, trained, batch)
    for one, other in zip(found, alone.loss(batch, torch.Generator()), strict=True):
        torch.testing.assert_close(one, other)
    found.total.backward()
    gradients = [p.grad for p in trained.network.backbone.parameters() if p.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_the_reports_are_of_the_heads_in_both_stages(target: LoadedModel) -> None:
    trained = objective(target)
    first, second = (loss_at(done, trained, capture(trained)) for done in (0.0, 0.5))
    for name in ("loss_P", "hits_P", "rows_P"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=1e-4, atol=0)


def test_the_model_learns_later_and_more_slowly(target: LoadedModel) -> None:
    trained = objective(target, heads_first=0.4)
    trained.done = 0.39
    assert [trained.rate(part) for part in trained.parts] == [1.0, 0.0]
    rates = []
    for trained.done in (0.4, 0.46, 0.52, 1.0):
        rates.append(trained.rate("backbone."))
    assert rates == pytest.approx([0.0, 0.125, 0.25, 0.25])
    for values, rate in (({"backbone": "full"}, 0.02), ({"backbone_rate": 0.5}, 0.5)):
        other = objective(target, **values)
        other.done = 0.9
        assert other.rate("backbone.") == rate


def test_a_part_of_the_vocabulary_is_refused(target: LoadedModel) -> None:
    part = Vocabulary(torch.arange(0, VOCAB, 3), VOCAB)
    with pytest.raises(ConfigError, match='set draft_vocab = "all"'):
        Medusa2(Medusa2Settings(), target, part, torch.Generator())
    assert OBJECTIVES["medusa2"].defaults["draft_vocab"] == "all"


# ---- what it learns, what it becomes ------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_learns_eight_sequences_by_heart(tmp_path: Path, backbone: str) -> None:
    folder = tiny_folder(tmp_path / "sure", seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8  # its law leaves little to chance
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sure = load(str(folder), dtype="float32", device="cpu")
    trained = objective(sure, heads=2, backbone=backbone)
    batch = Capture(trained.target, ())(answers(sure, 8, length=12))
    before = loss_at(0.0, trained, batch)
    assert before.hits_P[0] / before.rows_P[0] < 0.5
    parts = trained.network.heads, trained.network.backbone
    groups = [{"params": [p for p in part.parameters() if p.requires_grad]} for part in parts]
    optimiser = torch.optim.Adam(groups)
    for step in range(200):
        trained.done = step / 200
        for group, part in zip(optimiser.param_groups, trained.parts, strict=True):
            group["lr"] = 2e-2 * trained.rate(part)
        optimiser.zero_grad()
        trained.loss(batch, torch.Generator()).total.backward()
        optimiser.step()
    after = loss_at(1.0, trained, batch)
    assert after.hits_P[0] / after.rows_P[0] > 0.95


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_the_engine_drafts_and_answers_from_the_logits_of_training(
    target: LoadedModel, backbone: str, tmp_path: Path
) -> None:
    trained = randomised(objective(target, backbone=backbone))
    folder = tmp_path / "new"
    trained.save(folder, trained.network.state_dict())
    served = trained.served(folder)
    tokens = text((0, 20), length=20, seed=1).tokens
    states_NC = trained.network.backbone(torch.tensor([tokens]))[0].detach()
    head = trained.target.head_logits
    taps_RTC = taps_of(served, tokens, (served.target.info.layers,))
    normed_RC = served.target.final_norm(taps_RTC[:, 0])  # type: ignore[attr-defined]
    own_RV = served.target.head_logits(normed_RC)  # type: ignore[attr-defined]
    torch.testing.assert_close(own_RV, head(states_NC), rtol=0, atol=1e-4)
    assert (own_RV - head(capture_states(target, tokens))).abs().max() > 0.1, "it was not changed"

    expected_NKV = trained.network.heads(states_NC, head).detach()
    context = DraftContext(served.target, served.target.new_store(64), None, drafting.refuse)
    drafter = make_drafter(trained.spec(folder), context)
    assert isinstance(drafter, Medusa)
    for cached in (1, 7, 18):
        asked = request(tokens[: cached + 1])
        asked.span = Span(0, 64)
        asked.span.length = cached
        drafter.observe([asked], [Verdict((), tokens[cached])], [taps_RTC[:cached]])
        logits_KV = drafter._runner.logits(drafter._taps[asked.id][-1], 4)[0]
        torch.testing.assert_close(logits_KV, expected_NKV[cached - 1], rtol=0, atol=1e-4)
        assert (logits_KV - expected_NKV[cached]).abs().max() > 0.1, "blind to the row"
        drafter.release(asked)


def capture_states(target: LoadedModel, tokens: list[int]) -> Tensor:
    example = text((0, 20), length=20, seed=1)
    assert example.tokens == tokens
    return Capture(target.target, ())([example]).final_BRC[0]  # type: ignore[arg-type]


def test_an_untrained_one_is_the_original(target: LoadedModel, tmp_path: Path) -> None:
    trained = objective(target)
    trained.save(tmp_path / "new", trained.network.state_dict())
    new = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in load_file(Path(target.name) / "model.safetensors").items():
        assert torch.equal(new.pop(name), tensor)
    assert all(name.startswith("medusa_head.") for name in new)
    quality = trained.quality(trained.served(tmp_path / "new"), TEXTS)
    assert (quality.kl, quality.agreement, quality.tokens) == (0.0, 1.0, 7 + 8)
