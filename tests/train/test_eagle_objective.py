from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.eagle import EagleThree
from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.models.packing import Part, pack_parts
from forerun.train.capture import Batch
from forerun.train.examples import Example
from forerun.train.objectives import Objective
from forerun.train.objectives.eagle import Eagle3Objective, EagleOptions
from forerun.train.objectives.unroll import Plan
from forerun.train.vocabulary import Vocabulary
from tiny import tiny_llama
from training import captured, objective, target, texts

REDUCED = Vocabulary(torch.arange(0, 250, 2), 259)
OPTIONS: dict[str, tuple[dict[str, Any], Vocabulary | None]] = {
    "eagle3": ({}, None),
    "reduced": ({}, REDUCED),
    "eagle3.1": ({"norm_output": True, "fc_norm": True}, None),
    "deep": ({"layers": 2, "taps": (1, 4), "unroll": 4, "train_head": True}, REDUCED),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return target(tmp_path_factory.mktemp("target"))


@pytest.fixture(params=OPTIONS)
def eagle(request: pytest.FixtureRequest, model: LoadedModel) -> Eagle3Objective:
    options, vocabulary = OPTIONS[request.param]
    found = objective("eagle3", model, vocabulary, **{"taps": (1, 2, 3), **options})
    assert isinstance(found, Eagle3Objective)
    return found


class Drafting:
    """The engine's drafter, made to follow a given text; float32."""

    def __init__(self, model: LoadedModel, objective: Objective, folder: Path) -> None:
        objective.save(folder, objective.network.state_dict())
        context = DraftContext(model.target, model.target.new_store(64), model.tokenizer, _refuse)
        drafter = make_drafter(f"eagle3:{folder},k=4", context)
        assert isinstance(drafter, EagleThree)
        assert drafter.taps == objective.taps
        self.runner = drafter._runner

    def logits(self, taps_RTC: Tensor, tokens: list[int], anchor: int, steps: int) -> Tensor:
        """Behind row `anchor`, if the text is what is drafted, [S, U]."""
        store, rows = self.runner.store, anchor + 1
        span = store.open()
        store.reserve(span, rows + steps)
        chain = range(-1, rows + steps)
        packed = pack_parts(tokens[1 : rows + 1], [Part(span, chain[:rows], rows)])
        features_RF = taps_RTC[:rows].flatten(1).contiguous()
        hidden_1C = self.runner.run(packed, self.runner.fuse(features_RF))[-1:].clone()
        store.commit(span, range(rows))
        found = [self.runner.logits(hidden_1C)]
        for step in range(1, steps):
            packed = pack_parts([tokens[rows + step]], [Part(span, chain[:step], 1)])
            hidden_1C = self.runner.run(packed, hidden_1C).clone()
            found.append(self.runner.logits(hidden_1C))
        store.release(span)
        return torch.cat(found)


def _refuse(name: str) -> LoadedModel:
    raise AssertionError(name)


def expected(
    model: LoadedModel, eagle: Eagle3Objective, examples: list[Example], folder: Path
) -> dict[str, Tensor]:
    """The loss, token by token, with the logits of drafting."""
    drafting = Drafting(model, eagle, folder)
    steps, ids = eagle.options.unroll, eagle.vocabulary.ids_U.tolist()
    sums = {name: torch.zeros(steps) for name in ("loss", "hits", "rows")}
    for example in examples:
        batch = captured(eagle, [example])
        truth_RV = model.target.head_logits(batch.final_BRC[0])  # row r: the law of token r + 1
        for anchor in range(len(example.tokens) - 2):
            drafted = 0
            while drafted < steps and all(example.supervised[anchor + 1 : anchor + 3 + drafted]):
                drafted += 1
                if anchor + 2 + drafted > len(example.tokens) - 1:
                    break
            if not drafted:
                continue
            logits_SU = drafting.logits(batch.taps_BRTC[0], example.tokens, anchor, drafted)
            for s in range(drafted):
                label = example.tokens[anchor + 2 + s]
                sums["rows"][s] += 1
                if label in ids:
                    law_U = truth_RV[anchor + 1 + s][ids].softmax(-1)
                    sums["loss"][s] -= (law_U * logits_SU[s].log_softmax(-1)).sum()
                    sums["hits"][s] += ids[int(logits_SU[s].argmax())] == label
    return sums


def loss_of(eagle: Eagle3Objective, batch: Batch) -> dict[str, Tensor]:
    found = eagle.loss(batch, torch.Generator())
    weights_S = eagle.options.step_weight ** torch.arange(eagle.options.unroll)
    total = (weights_S * found.loss_P).sum() / found.count
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    return {"loss": found.loss_P, "hits": found.hits_P, "rows": found.rows_P}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], wanted[name], atol=1e-3, rtol=1e-5) for name in wanted)


def test_every_step_has_the_logits_of_drafting(
    model: LoadedModel, eagle: Eagle3Objective, tmp_path: Path
) -> None:
    drafting = Drafting(model, eagle, tmp_path / "draft")
    batch = captured(eagle, texts())
    plan = Plan.of(batch.supervised_BR)
    assert plan.anchors.counts == [6, 5, 7, 0]
    for s, states_MC in enumerate(eagle.unrolled(batch, plan)):
        head = eagle.network.lm_head
        assert head is not None
        for m, logits_U in enumerate(head(states_MC)):
            b, row = int(plan.anchors.sequence_N[m]), int(plan.anchors.row_N[m])
            tokens = texts()[b].tokens
            if row + 1 + s < len(tokens):
                drafted_SU = drafting.logits(batch.taps_BRTC[b], tokens, row, s + 1)
                assert torch.allclose(logits_U, drafted_SU[s], atol=1e-4)


def test_the_loss_is_that_of_drafting_the_answers(
    model: LoadedModel, eagle: Eagle3Objective, tmp_path: Path
) -> None:
    examples = texts()
    wanted = expected(model, eagle, examples, tmp_path / "draft")
    batch = captured(eagle, examples)
    assert close(loss_of(eagle, batch), wanted)
    assert wanted["rows"].tolist()[:3] == [18, 14, 10]

    later = torch.roll(batch.supervised_BR, 1, 1)
    assert not close(loss_of(eagle, replace(batch, supervised_BR=later)), wanted)
    longer = batch.supervised_BR | torch.roll(batch.supervised_BR, -1, 1)
    assert not close(loss_of(eagle, replace(batch, supervised_BR=longer)), wanted)
    shifted = torch.roll(batch.final_BRC, 1, 1)
    assert not close(loss_of(eagle, replace(batch, final_BRC=shifted)), wanted)
    moved = torch.roll(batch.tokens_BR, 1, 1)
    assert not close(loss_of(eagle, replace(batch, tokens_BR=moved)), wanted)


def test_texts_do_not_touch_each_other(eagle: Eagle3Objective) -> None:
    together = loss_of(eagle, captured(eagle, texts()))
    alone = [loss_of(eagle, captured(eagle, [example])) for example in texts()[:3]]
    for name, sums_S in together.items():
        assert torch.allclose(sums_S, sum(each[name] for each in alone), atol=1e-3)


def test_a_batch_without_anything_to_learn_has_no_gradient(eagle: Eagle3Objective) -> None:
    found = eagle.loss(captured(eagle, texts()[3:]), torch.Generator())
    assert found.count == found.total == 0
    assert len(found.rows_P) == eagle.options.unroll
    found.total.backward()
    trained = [p for p in eagle.network.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_taps_that_the_target_has_not_are_refused(tmp_path: Path) -> None:
    shallow = tiny_llama(tmp_path, layers=2)
    with pytest.raises(ConfigError, match="do not ascend within the 2 layers"):
        objective("eagle3", shallow)


def test_it_starts_as_the_last_layer_of_the_target(model: LoadedModel) -> None:
    made = Eagle3Objective(EagleOptions(taps=(1, 2, 3)), model, REDUCED, torch.Generator())
    rows_VC = model.target.head_logits(torch.eye(32)).t()
    assert torch.equal(made.network.lm_head.weight, rows_VC[REDUCED.ids_U])
    weights = load_file(Path(model.name) / "model.safetensors")
    layer = made.network.get_submodule("layers.0")
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
        mine = layer.get_submodule(name).weight
        assert torch.equal(mine, weights[f"model.layers.3.{name}.weight"])
    keys = layer.get_submodule("self_attn.k_proj").weight
    assert torch.equal(keys[:, 32:], weights["model.layers.3.self_attn.k_proj.weight"])
    taps = torch.randn(5, 96)
    assert torch.equal(made.network.fuse(taps), taps[:, 64:])
    assert torch.equal(made.network.norm.weight, weights["model.norm.weight"])
