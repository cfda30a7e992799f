"""Runs that begin with an earlier draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.train import earlier
from forerun.train.objectives.base import head_rows
from forerun.train.recipe import Recipe
from forerun.train.trainer import Trainer
from training import target, text

TEXTS = [text((4, 12 + i), length=12 + i, seed=i) for i in range(12)]
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"taps": [1, 2, 3]},
    "dflash": {"block": 4, "anchors": 8, "mask_token": 3},
    "medusa": {"heads": 2},
}
OUTPUT = {"eagle3": "lm_head.weight", "dflash": "lm_head.weight", "medusa": "lm_heads.0.weight"}


class Silent:
    def say(self, sentence: str) -> None: ...

    def step(self, step: object) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return target(tmp_path_factory.mktemp("target"))


def trainer(model: LoadedModel, folder: Path, kind: str, **values: Any) -> Trainer:
    small = {"tokens": 800, "batch": 5, "trials": 0, "precision": "float32", "draft_vocab": 200}
    recipe = Recipe(**{"kind": kind, **small, "options": OPTIONS[kind], **values})
    return Trainer(recipe, model, TEXTS[:10], TEXTS[10:], folder, Silent())


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_a_run_begins_where_an_earlier_one_ended(
    model: LoadedModel, tmp_path: Path, kind: str
) -> None:
    fresh = trainer(model, tmp_path / "first", kind)
    untrained = {name: each.clone() for name, each in fresh.objective.network.state_dict().items()}
    curve = fresh.run().curve
    start = str(tmp_path / "first")
    again = trainer(model, tmp_path / "second", kind, start=start)
    kept = earlier.read(kind, start, model.target.info.name).state_dict()
    found = again.objective.network.state_dict()
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert any(not torch.equal(found[name], untrained[name]) for name in kept)
    assert torch.equal(again.objective.vocabulary.ids_U, fresh.objective.vocabulary.ids_U)
    assert again.run().curve[0] < curve[0]


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_an_earlier_draft_may_come_to_propose_more(
    model: LoadedModel, tmp_path: Path, kind: str
) -> None:
    before = trainer(model, tmp_path / "first", kind)
    before.run()
    start = str(tmp_path / "first")
    wider = trainer(model, tmp_path / "second", kind, start=start, draft_vocab=230)
    known_U = before.objective.vocabulary.ids_U
    ids_U = wider.objective.vocabulary.ids_U
    assert len(ids_U) == 230
    assert torch.isin(known_U, ids_U).all()
    proposed_U = earlier.proposed(wider.objective.network)
    assert proposed_U is not None
    assert torch.equal(proposed_U, ids_U)
    kept = earlier.read(kind, start, model.target.info.name).state_dict()
    rows_UC = head_rows(model.target, ids_U)
    rows_UC[torch.isin(ids_U, known_U)] = kept[OUTPUT[kind]]
    found = wider.objective.network.state_dict()
    assert torch.equal(found.pop(OUTPUT[kind]), rows_UC)
    assert all(torch.equal(found[n], kept[n]) for n in found if found[n].is_floating_point())
    wider.run()
    for name, size in (("third", 150), ("fourth", "all")):
        same = trainer(model, tmp_path / name, kind, start=start, draft_vocab=size)
        assert torch.equal(same.objective.vocabulary.ids_U, known_U)


def test_a_draft_that_is_built_otherwise_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    trainer(model, tmp_path / "first", "eagle3").run()
    start = str(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"was made with taps \(1, 2, 3\), the new draft has"):
        trainer(model, tmp_path / "second", "eagle3", start=start, options={"taps": [1, 2, 4]})


def test_kinds_that_change_the_model_begin_with_it() -> None:
    with pytest.raises(ConfigError, match="medusa2 begins with the model itself; leave out start"):
        earlier.read("medusa2", "anything", "model")


def test_a_start_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no eagle3 draft 'nowhere'"):
        earlier.read("eagle3", "nowhere", "model")
