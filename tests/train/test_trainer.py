from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.train.examples import Example
from forerun.train.recipe import Recipe
from forerun.train.state import PROVENANCE, STATE
from forerun.train.trainer import Step, Trainer
from training import target, text


@dataclass
class Watch:
    """A report that may end a run."""

    stop_at: int = -1
    said: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, step: Step) -> None:
        if step.step == self.stop_at:
            raise KeyboardInterrupt
        self.steps.append(step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return target(tmp_path_factory.mktemp("target"))


EXAMPLES = [text((4, 12 + i), length=12 + i, seed=i) for i in range(12)]


def recipe(**values: Any) -> Recipe:
    small = {"kind": "eagle3", "tokens": 1500, "batch": 5, "trials": 0, "precision": "float32"}
    options = {"taps": [1, 2, 3]}
    return Recipe(**{**small, "draft_vocab": 200, "options": options, **values})


def run(model: LoadedModel, folder: Path, watch: Watch | None = None, **values: Any) -> list[float]:
    watch = watch or Watch()
    learned, held = EXAMPLES[:10], EXAMPLES[10:]
    trainer = Trainer(recipe(**values), model, learned, held, folder, watch, ["forerun", "train"])
    return trainer.run().curve


def test_a_killed_run_goes_on_with_the_same_losses(model: LoadedModel, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    assert len(whole) == 18
    assert whole[-1] < whole[0]
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "killed", Watch(stop_at=9))
    assert (tmp_path / "killed" / STATE).exists()
    watch = Watch()
    assert run(model, tmp_path / "killed", watch) == whole
    assert watch.steps[0].step == 9
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    assert run(model, tmp_path / "other", seed=1) != whole
