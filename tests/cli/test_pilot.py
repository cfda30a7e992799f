"""`forerun train pilot` on a model of a few thousand weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.train import pilot
from forerun.train.pilot import Prospect
from tiny import tiny_folder

COMMON = """
batch = 2
draft_vocab = 200
held_out = 0.2
trial_tokens = 6
trials = 1
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """What every command is given."""
    model = tiny_folder(tmp_path / "model", layers=4, vocab=264)
    turns = [
        [
            {"role": "user", "content": f"Count to {i}"},
            {"role": "assistant", "content": " ".join(map(str, range(i)))},
        ]
        for i in range(4, 14)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    return ["--model", str(model), "--data", str(data)]


def recipe(path: Path, kind: str | None, options: str = "") -> str:
    path.write_text((f'kind = "{kind}"' if kind else "") + f"{COMMON}\n[options]\n{options}\n")
    return str(path)


def test_every_kind_is_begun_and_the_chosen_one_goes_on(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "pilots"
    run = ["train", "pilot", *files, "--out", str(out), "--tokens", "6000"]
    for kind, options in (("eagle3", "taps = [1, 2, 3]"), ("medusa", ""), ("dflash", "layers = 1")):
        run += ["--config", recipe(tmp_path / f"{kind}.toml", kind, options)]

    def eagle3(prospects: list[Prospect]) -> Prospect:  # which is fastest here is chance
        return next(each for each in prospects if each.kind == "eagle3")

    monkeypatch.setattr(pilot, "best", eagle3)
    assert main(run) == 0
    said = capsys.readouterr()
    figures = json.loads((out / "pilot.json").read_text())
    assert [each["kind"] for each in figures] == ["corpus", "eagle3", "medusa", "dflash"]
    for each in figures:
        assert each["lengths"]["low"] <= each["lengths"]["likely"] <= each["lengths"]["high"]
        assert any(line.split()[:1] == [each["kind"]] for line in said.out.splitlines())
    steps = figures[1]["steps"]
    assert figures[1]["step"] == round(steps / 10)
    assert f"{round(steps / 10)} of {steps}" in said.out
    assert "Train eagle3: it is likely" in said.out or "None is likely" in said.out

    train = shlex.split(said.out.splitlines()[-1])
    assert main(train[1:]) == 0
    said = capsys.readouterr()
    assert f"going on behind step {round(steps / 10)} of {steps}" in said.err
    assert said.out == f"{out / 'eagle3'}\n"
    assert json.loads((out / "eagle3" / "training.json").read_text())["finished"] is True


def test_a_tenth_that_is_too_short_says_so(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", recipe(tmp_path / "e.toml", "eagle3", "taps = [1, 2, 3]")]
    run = ["train", "pilot", *files, "--out", str(tmp_path / "p"), *config, "--tokens", "100"]
    assert main(run) == 1
    assert "steps of eagle3, too few to see where they lead" in capsys.readouterr().err


def test_recipes_are_told_apart_by_their_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = recipe(tmp_path / "a.toml", "medusa"), recipe(tmp_path / "b.toml", None)
    run = ["train", "pilot", "--data", "d", "--out", str(tmp_path / "o")]
    assert main([*run, "--config", one, "--config", one]) == 1
    assert "two recipes for medusa; leave one out" in capsys.readouterr().err
    assert main([*run, "--config", other]) == 1
    assert 'write kind = one of "eagle3", "medusa", "dflash"' in capsys.readouterr().err
