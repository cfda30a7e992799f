from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forerun.core import SamplingParams
from forerun.engine import engine
from forerun.engine.costs import Costs
from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.train import trainer
from forerun.train.evaluate import Trial
from forerun.train.examples import Example
from forerun.train.objectives import OBJECTIVES
from forerun.train.recipe import Recipe, make_recipe, read_toml
from forerun.train.state import PROVENANCE, RECIPE, STATE, Progress
from forerun.train.trainer import Step, Trainer
from forerun.tune.bench import Bench, Setting
from forerun.tune.workloads import Prompt, Workload
from training import answers, target, text


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


def run(
    model: LoadedModel,
    folder: Path,
    watch: Watch | None = None,
    tried_after: tuple[float, ...] = (),
    **values: Any,
) -> list[float]:
    watch = watch or Watch()
    learned, held = EXAMPLES[:10], EXAMPLES[10:]
    made = Trainer(recipe(**values), model, learned, held, folder, watch, ["forerun", "train"])
    return made.run(tried_after).curve


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


def test_shuffled_rows_outlive_a_kill(model: LoadedModel, tmp_path: Path) -> None:
    values: dict[str, Any] = {"kind": "medusa", "options": {"heads": 2, "shuffle": 64}}
    whole = run(model, tmp_path / "whole", **values)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "killed", Watch(stop_at=9), **values)
    carried = list((tmp_path / "killed/training").glob("carried-*"))
    assert [file.name for file in carried] == ["carried-8-0.pt"]
    assert run(model, tmp_path / "killed", **values) == whole
    assert not list((tmp_path / "killed/training").glob("carried-*"))
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "without", Watch(stop_at=9), **values)
    (tmp_path / "without/training/carried-8-0.pt").unlink()
    assert run(model, tmp_path / "without", **values) != whole, "the rows mattered"


def test_a_run_that_was_left_goes_on_with_the_same_losses(
    model: LoadedModel, tmp_path: Path
) -> None:
    whole = run(model, tmp_path / "whole")
    watch = Watch()
    begun = run(model, tmp_path / "left", watch, tried_after=(0.1, 0.2))
    assert begun == whole[: len(begun)]
    assert (watch.steps[-1].step, watch.steps[-1].steps) == (4, 4)
    tried = [sentence for sentence in watch.said if "accepted" in sentence]
    assert [sentence.split(":")[0] for sentence in tried] == ["step 2", "step 4"]
    assert run(model, tmp_path / "left", tried_after=(0.1, 0.2)) == begun
    assert run(model, tmp_path / "left") == whole


def test_the_best_draft_is_kept_and_its_fastest_shape_named(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []

    def scripted(model: LoadedModel, specs: list[str], *_: Any) -> dict[str, Trial]:
        """The second of four trials is best; of shapes, the last is fastest."""
        folder = Path(specs[0].removeprefix("eagle3:").split(",")[0])
        tried.append((folder / "model.safetensors").read_bytes())
        length = (1.0, 2.0, 1.9, 1.9)[min(len(tried), 4) - 1]
        return {
            spec: Trial(60, length, [], length, speedup=float(place), identical=2, prompts=2)
            for place, spec in enumerate(specs, 1)
        }

    monkeypatch.setattr(trainer, "evaluate", scripted)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(model, folder, Watch(stop_at=15), trials=3)
    assert (folder / "model.safetensors").read_bytes() == tried[1] != tried[2]
    watch = Watch()
    assert run(model, folder, watch, trials=3) == run(model, tmp_path / "whole")
    assert (folder / "model.safetensors").read_bytes() == tried[1] == tried[4]
    assert any("the draft of step 6 is kept: accepted 2.00" in each for each in watch.said)
    record = json.loads((folder / PROVENANCE).read_text())
    assert record["best"] == 6
    assert record["spec"] == f"eagle3:{folder},top_k=4,nodes=16"
    assert not list(folder.glob(".new-*"))


def test_of_equal_drafts_the_last_is_kept() -> None:
    trials = [{"step": step, "acceptance_length": 1.5} for step in (3, 6)]
    assert Progress(6, trials=trials).best is trials[1]


def test_a_folder_takes_no_other_run(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "run", Watch(stop_at=3))
    with pytest.raises(ConfigError, match=r"another lr \(0\.001, not 0\.002\); name a new folder"):
        run(model, tmp_path / "run", lr=2e-3)
    with pytest.raises(ConfigError, match="another unroll"):
        run(model, tmp_path / "run", options={"taps": [1, 2, 3], "unroll": 2})
    run(model, tmp_path / "run")
    with pytest.raises(ConfigError, match="is finished; name a new folder"):
        run(model, tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        run(model, tmp_path / "other")


def test_a_loss_that_is_not_finite_ends_the_run(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the loss is nan at step \d+; lower lr"):
        run(model, tmp_path / "run", lr=1e30, warmup=0.0)


def test_eight_answers_are_learned_by_heart(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Passes whose rows cost next to nothing: all that is drafted is checked.
    monkeypatch.setattr(engine, "measure", lambda *_: Costs({1: 8.0, 8: 8.1, 32: 9.0}))
    learned, held = answers(model, 8), answers(model, 10)[8:]
    tokens = 200 * 8 * len(learned[0].tokens)
    values = {"tokens": tokens, "batch": 8, "lr": 1e-2, "draft_vocab": "all"}
    watch = Watch()
    Trainer(recipe(**values), model, learned, held, tmp_path / "run", watch).run()
    assert watch.steps[-1].steps == 200
    assert watch.steps[-1].accuracy_P[0] > 0.95

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = LLM(model, draft=f"eagle3:{tmp_path / 'run'},k=3,min_prob=0")
    output = llm.generate(learned[0].tokens[:6], params)[0]
    assert output.outputs[0].token_ids == learned[0].tokens[6:]
    assert output.stats.acceptance_length > 3


def test_what_it_prints_is_what_bench_measures(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Passes that cost so much that the time to draft is nothing: both make the same plans.
    monkeypatch.setattr(engine, "measure", lambda *_: Costs({1: 8.0, 8: 9.0, 32: 25.0}))
    texts = ["Hello", "What is a fox?", "Two and two", "Name a river"]
    messages = [[{"role": "user", "content": content}] for content in texts]
    held = []
    for each in messages:
        prompt = model.tokenizer.chat(each)
        held.append(Example([*prompt, 65], [False] * len(prompt) + [True], str(each)))
    learned = answers(model, 8)
    values = {"tokens": 3000, "lr": 1e-2, "trials": 2, "trial_tokens": 24, "trial_prompts": 4}
    made = Trainer(recipe(**values), model, learned, held, tmp_path / "run", Watch())
    progress = made.run()
    assert [trial["step"] for trial in progress.trials] == [0, 10, 20]
    kept = progress.best
    assert kept

    asked = Workload("mine", tuple(Prompt(str(i), tuple(m)) for i, m in enumerate(messages)))
    params = SamplingParams(temperature=0, max_tokens=24, seed=0)
    spec = f"eagle3:{tmp_path / 'run'},k=3"
    bench = Bench(model, Setting([asked], [spec], params=params), lambda s, n: LLM(model, draft=s))
    list(bench.run())
    row = bench.rows()[-1]
    assert row.acceptance_length == pytest.approx(kept["acceptance_length"], rel=0.02)
    assert row.acceptance_per_position == pytest.approx(kept["acceptance_per_position"], rel=0.02)
    assert row.acceptance_length > 1


def test_a_run_says_where_it_comes_from(model: LoadedModel, tmp_path: Path) -> None:
    run(model, tmp_path / "run")
    record = json.loads((tmp_path / "run" / PROVENANCE).read_text())
    assert record["command"] == ["forerun", "train"]
    assert record["finished"] is True
    assert record["identity"]["model"] == model.name
    assert len(record["identity"]["data"]) == 16
    assert record["identity"]["recipe"]["seed"] == 0
    assert {"torch", "forerun"} <= record["versions"].keys()
    assert len(record["curve"]) == record["steps"] == 18


def test_a_recipe_file_gives_the_same_run(model: LoadedModel, tmp_path: Path) -> None:
    run(model, tmp_path / "run")
    values = read_toml(tmp_path / "run" / RECIPE)
    made = OBJECTIVES["eagle3"]
    again = make_recipe("eagle3", made.defaults, made.settings, values, {})
    first = json.loads((tmp_path / "run" / PROVENANCE).read_text())["identity"]["recipe"]
    assert {k: v for k, v in again.model_dump(mode="json").items() if k != "options"} == {
        k: v for k, v in first.items() if k != "options"
    }
    assert made.settings(**again.options) == made.settings(**first["options"])


def test_kept_states_change_nothing(model: LoadedModel, tmp_path: Path) -> None:
    watch = Watch()
    kept = run(model, tmp_path / "kept", watch, cache=True)
    assert kept == run(model, tmp_path / "fresh")
    assert any("kept on disk while the run lasts" in sentence for sentence in watch.said)
    assert sorted(file.name for file in (tmp_path / "kept" / "training").iterdir()) == [
        "recipe.toml"
    ]


def test_a_budget_of_time_becomes_a_number_of_steps(model: LoadedModel, tmp_path: Path) -> None:
    watch = Watch()
    run(model, tmp_path / "run", watch, tokens=None, budget_seconds=1.0)
    assert watch.steps[-1].step == watch.steps[-1].steps == len(watch.steps)
    assert any("steps of 5 texts" in sentence for sentence in watch.said)
