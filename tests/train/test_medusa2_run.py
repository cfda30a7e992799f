"""Whole runs of Medusa-2: what they leave behind, and where they stop."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun.core import SamplingParams
from forerun.engine import engine
from forerun.engine.costs import Costs
from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from forerun.interop import formats
from forerun.models.hub import LoadedModel, load
from forerun.train.quality import Yardstick
from forerun.train.recipe import Recipe
from forerun.train.state import PROVENANCE, STATE, Progress
from forerun.train.trainer import Step, Trainer
from tiny import tiny_llama
from training import text

EXAMPLES = [text((4, 12 + i), length=12 + i, seed=i) for i in range(12)]


@dataclass
class Watch:
    stop_at: int = -1
    said: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, step: Step) -> None:
        if step.step == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes so costly that the time to draft is nothing: which draft is best is certain."""
    monkeypatch.setattr(engine, "measure", lambda *_: Costs({1: 8.0, 8: 9.0, 32: 25.0}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


def run(model: LoadedModel, folder: Path, watch: Watch | None = None, **options: Any) -> Progress:
    values: dict[str, Any] = {"kind": "medusa2", "tokens": 1000, "batch": 5, "trials": 3}
    small = {"trial_prompts": 2, "trial_tokens": 4, "precision": "float32", "draft_vocab": "all"}
    chosen = {"rank": 4, "heads": 2, "heads_first": 0.4, "max_kl": 1e9, **options}
    recipe = Recipe(**values, **small, lr=0.05, options=chosen)
    return Trainer(recipe, model, EXAMPLES[:10], EXAMPLES[10:], folder, watch or Watch()).run()


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / PROVENANCE).read_text())
    return found


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_a_killed_run_goes_on_with_the_same_losses(
    model: LoadedModel, tmp_path: Path, backbone: str
) -> None:
    whole = run(model, tmp_path / "whole", backbone=backbone)
    assert len(whole.curve) == 12
    for kill in (3, 7):  # in either stage
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / f"killed{kill}", Watch(stop_at=kill), backbone=backbone)
        assert (tmp_path / f"killed{kill}" / STATE).exists()
        again = run(model, tmp_path / f"killed{kill}", backbone=backbone)
        assert again.curve == whole.curve
        files = [tmp_path / name / "model.safetensors" for name in ("whole", f"killed{kill}")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_it_leaves_a_model_with_its_heads(model: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    progress = run(model, folder)
    trials = progress.trials
    assert [trial["step"] for trial in trials] == [0, 4, 8, 12]
    assert recorded(folder)["trials"] == trials
    kls = [trial["quality"]["kl"] for trial in trials]
    assert kls[0] == kls[1] == 0.0, "in the first stage the model stays as it is"
    assert kls[2] > 0
    assert kls[3] > 0.001, "and in the second it learns"

    assert formats.family(folder) == "medusa"
    assert formats.is_model(folder)
    changed = load(str(folder), "float32", "cpu")
    yardstick = Yardstick(model.target, EXAMPLES[10:], 1.0)  # type: ignore[arg-type]
    assert progress.best
    kept = progress.best["quality"]["kl"]
    assert yardstick(changed.target).kl == pytest.approx(kept)  # type: ignore[arg-type]
    assert progress.spec
    assert progress.spec.startswith(f"medusa:{folder}")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain, drafted = (
        LLM(changed, draft=spec).generate("Hello", params)[0].outputs[0].token_ids
        for spec in ("none", f"medusa:{folder}")
    )
    assert plain == drafted
    line = formats.export("vllm", folder, tmp_path / "vllm")
    assert line.startswith(f"vllm serve {folder} ")


def test_it_stops_at_its_bound_and_keeps_the_best_draft_within(
    model: LoadedModel, tmp_path: Path
) -> None:
    free = run(model, tmp_path / "free").trials
    bound = free[2]["quality"]["kl"] * 1.01
    assert free[3]["quality"]["kl"] > bound, "the run would pass it"
    watch = Watch()
    progress = run(model, tmp_path / "held", watch, max_kl=bound)
    assert progress.stopped == {"step": 12, "quality": free[3]["quality"] | {"max_kl": bound}}
    assert [trial["step"] for trial in progress.trials] == [0, 4, 8]
    assert "stopped, for the bound is passed; the best draft within it is kept" in watch.said
    record = recorded(tmp_path / "held")
    assert record["finished"]
    assert record["stopped"] == progress.stopped
    kept = load(str(tmp_path / "held"), "float32", "cpu")
    yardstick = Yardstick(model.target, EXAMPLES[10:], bound)  # type: ignore[arg-type]
    assert not yardstick(kept.target).passed  # type: ignore[arg-type]
    assert progress.best
    within = progress.best["quality"]["kl"]
    assert yardstick(kept.target).kl == pytest.approx(within)  # type: ignore[arg-type]


def test_it_stops_before_the_end(model: LoadedModel, tmp_path: Path) -> None:
    progress = run(model, tmp_path / "held", max_kl=1e-9)
    assert progress.stopped
    assert (progress.step, progress.steps) == (8, 12)
    kept = load_file(tmp_path / "held" / "model.safetensors")
    for name, tensor in load_file(Path(model.name) / "model.safetensors").items():
        assert torch.equal(kept[name], tensor)
    with pytest.raises(ConfigError, match="is finished"):
        run(model, tmp_path / "held", max_kl=1e-9)


def test_without_trials_nothing_would_hold_it(model: LoadedModel, tmp_path: Path) -> None:
    recipe = Recipe(kind="medusa2", tokens=100, trials=0, draft_vocab="all")
    with pytest.raises(ConfigError, match="set trials to 1 or more"):
        Trainer(recipe, model, EXAMPLES[:10], EXAMPLES[10:], tmp_path / "new", Watch())
