from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import drafting
from drafting import request
from forerun.core import Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.medusa import Medusa
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel, load
from forerun.train.capture import Batch, Capture
from forerun.train.examples import Example
from forerun.train.objectives.base import Loss
from forerun.train.objectives.medusa import Medusa1, MedusaSettings
from forerun.train.vocabulary import Vocabulary, full
from learned_dflash import taps_of
from tiny import VOCAB, tiny_folder, tiny_llama

DRAFT_IDS = torch.arange(0, VOCAB, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A target that leaves little to chance: what its law teaches is what it writes."""
    folder = tiny_folder(tmp_path_factory.mktemp("sure"), seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load(str(folder), dtype="float32", device="cpu")


def objective(target: LoadedModel, vocabulary: Vocabulary | None = None, **values: Any) -> Medusa1:
    numbers = torch.Generator().manual_seed(0)
    chosen = vocabulary or full(VOCAB)
    return Medusa1(MedusaSettings(**values), target, chosen, numbers)


def example(length: int, prompt: int, seed: int) -> Example:
    """A random text; what stands behind `prompt` tokens was written by the assistant."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (length,), generator=noise).tolist()
    return Example(tokens, [t >= prompt for t in range(length)], str(seed))


def capture(target: LoadedModel, *examples: Example) -> Batch:
    return Capture(target.target, ())(examples)  # type: ignore[arg-type]


def randomised(trained: Medusa1) -> Medusa1:
    noise = torch.Generator().manual_seed(3)
    for parameter in trained.network.blocks.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise) * 0.2
    return trained


def loss_of(trained: Medusa1, batch: Batch) -> Loss:
    return trained.loss(batch, torch.Generator())


# ---- what is taught -----------------------------------------------------------------------------


def literal_loss(trained: Medusa1, batch: Batch, hard: bool, shift: int = 0) -> Tensor:
    """Head by head and token by token, with the whole of the logits."""
    target, heads = trained.target, trained.network
    ids_U = trained.vocabulary.ids_U
    known = {int(token): u for u, token in enumerate(ids_U)}
    total, count = torch.zeros(()), 0.0
    for b, length in enumerate(batch.lengths_B.tolist()):
        logits_RKU = heads(batch.final_BRC[b], target.head_logits)
        laws_RU = target.head_logits(batch.final_BRC[b])[:, ids_U].softmax(-1)
        for k in range(heads.config.heads):
            for t in range(length - 2 - k):
                label = int(batch.tokens_BR[b, t + 2 + k])
                if not batch.supervised_BR[b, t + 2 + k] or (hard and label not in known):
                    continue
                law_U = laws_RU[t + 1 + k + shift]
                if hard:
                    law_U = functional.one_hot(torch.tensor(known[label]), len(ids_U)).float()
                weight = 0.8**k
                total = total - weight * (law_U * logits_RKU[t, k].log_softmax(-1)).sum()
                count += weight
    return total / count


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("ids_U", [torch.arange(VOCAB), DRAFT_IDS])
def test_the_loss_is_the_weighted_cross_entropy_of_the_tokens_that_follow(
    target: LoadedModel, labels: str, ids_U: Tensor
) -> None:
    trained = randomised(objective(target, Vocabulary(ids_U, VOCAB), labels=labels))
    batch = capture(target, example(12, 5, 1), example(9, 0, 2))
    found = loss_of(trained, batch).total
    torch.testing.assert_close(found, literal_loss(trained, batch, labels == "hard"))
    found.backward()
    got = [p.grad for p in trained.network.blocks.parameters()]
    for parameter in trained.network.blocks.parameters():
        parameter.grad = None
    literal_loss(trained, batch, labels == "hard").backward()
    for gradient, parameter in zip(got, trained.network.blocks.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_law_of_the_row_beside_is_another_loss(target: LoadedModel) -> None:
    trained = randomised(objective(target))
    batch = capture(target, example(12, 5, 1))
    shifted = literal_loss(trained, batch, hard=False, shift=-1)
    assert (loss_of(trained, batch).total - shifted).abs() > 0.05


def test_rows_are_counted_where_the_token_they_predict_is_supervised(target: LoadedModel) -> None:
    batch = capture(target, example(12, 5, 1), example(4, 0, 2), example(3, 2, 3))
    found = loss_of(objective(target, heads=3), batch)
    # 7 supervised tokens; 3 with a state in front, of which the first heads see 2, 1 and none; 1.
    assert found.rows_P.tolist() == [7 + 2 + 1, 7 + 1, 7]


def test_padding_changes_nothing(target: LoadedModel) -> None:
    trained = randomised(objective(target))
    texts = example(12, 5, 1), example(30, 5, 2)
    alone = [loss_of(trained, capture(target, text)) for text in texts]
    both = loss_of(trained, capture(target, *texts))
    torch.testing.assert_close(
        both.total * both.count, sum(each.total * each.count for each in alone)
    )


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_shuffling_the_rows_of_a_step_changes_nothing(target: LoadedModel, labels: str) -> None:
    known = Vocabulary(DRAFT_IDS, VOCAB)
    trained = randomised(objective(target, known, labels=labels))
    mixing = randomised(objective(target, known, labels=labels, shuffle=64))
    batch = capture(target, example(12, 5, 1), example(9, 0, 2))
    for value, mixed in zip(loss_of(trained, batch), loss_of(mixing, batch), strict=True):
        torch.testing.assert_close(value, mixed)


def test_a_step_learns_rows_of_earlier_texts(target: LoadedModel) -> None:
    mixing = randomised(objective(target, shuffle=64))
    first, second = (capture(target, example(14, 5, seed)) for seed in (1, 2))
    loss_of(mixing, first)
    mixed = loss_of(mixing, second)
    assert mixed.rows_P[0] == 9
    alone = [loss_of(randomised(objective(target)), batch).total for batch in (first, second)]
    assert min(alone) < mixed.total < max(alone)


# ---- where it starts, what it learns, what it becomes -------------------------------------------


def test_fresh_heads_say_what_the_target_says(target: LoadedModel) -> None:
    trained = objective(target, Vocabulary(DRAFT_IDS, VOCAB))
    states_NC = capture(target, example(10, 0, 1)).final_BRC[0]
    logits_NKU = trained.network(states_NC, trained.target.head_logits)
    own_NU = trained.target.head_logits(states_NC)[:, DRAFT_IDS]
    torch.testing.assert_close(logits_NKU, own_NU[:, None].expand_as(logits_NKU))


def test_only_the_residual_layers_are_trained(target: LoadedModel) -> None:
    trained = objective(target)
    names = {name for name, p in trained.network.named_parameters() if p.requires_grad}
    assert names == {f"blocks.{k}.layers.0.{part}" for k in range(4) for part in ("weight", "bias")}


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_learns_eight_sequences_by_heart(sure: LoadedModel, labels: str) -> None:
    trained = objective(sure, heads=2, labels=labels)
    batch = capture(sure, *(written(sure, seed) for seed in range(8)))
    before = loss_of(trained, batch)
    assert before.hits_P[0] / before.rows_P[0] < 0.5
    assert fit(trained, batch, steps=200) > 0.95


def written(target: LoadedModel, seed: int, prompt: int = 4, length: int = 16) -> Example:
    """A random prompt, and what the target says next."""
    tokens = example(prompt, prompt, seed).tokens
    while len(tokens) < length:
        states_RTC = taps_of(target, tokens, (target.target.info.layers,))
        normed_1C = target.target.final_norm(states_RTC[-1])  # type: ignore[attr-defined]
        tokens.append(int(target.target.head_logits(normed_1C).argmax()))  # type: ignore[attr-defined]
    return Example(tokens, [t >= prompt for t in range(length)], str(seed))


def fit(trained: Medusa1, batch: Batch, steps: int) -> float:
    """First-head accuracy behind so many steps."""
    learned = [p for p in trained.network.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(learned, lr=2e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of(trained, batch).total.backward()
        optimiser.step()
    found = loss_of(trained, batch)
    return float(found.hits_P[0] / found.rows_P[0])


@pytest.mark.parametrize("ids_U", [torch.arange(VOCAB), DRAFT_IDS])
def test_the_engine_drafts_from_the_logits_of_training(
    target: LoadedModel, ids_U: Tensor, tmp_path: Path
) -> None:
    trained = randomised(objective(target, Vocabulary(ids_U, VOCAB)))
    trained.save(tmp_path, trained.network.state_dict())
    tokens = example(20, 0, 1).tokens
    states_NC = capture(target, Example(tokens, [True] * 20, "")).final_BRC[0]
    expected_NKU = trained.network(states_NC, trained.target.head_logits)
    context = DraftContext(target.target, target.target.new_store(64), None, drafting.refuse)
    drafter = make_drafter(trained.spec(tmp_path), context)
    assert isinstance(drafter, Medusa)
    for cached in (1, 7, 18):
        asked = request(tokens[: cached + 1])
        asked.span = Span(0, 64)
        asked.span.length = cached
        taps_RTC = taps_of(target, tokens[:cached], drafter.taps)
        drafter.observe([asked], [Verdict((), tokens[cached])], [taps_RTC])
        logits_KU = drafter._runner.logits(drafter._taps[asked.id][-1], 4)[0]
        torch.testing.assert_close(logits_KU, expected_NKU[cached - 1], rtol=0, atol=1e-4)
        other_KU = expected_NKU[cached]
        assert (logits_KU - other_KU).abs().max() > 0.1, "blind to the row"
        drafter.release(asked)
    ids = drafter._runner.ids_U
    assert torch.equal(ids_U, ids if ids is not None else torch.arange(VOCAB))
