from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.cli.training import KINDS
from forerun.interop import formats
from forerun.train.objectives import OBJECTIVES
from tiny import tiny_folder

RECIPE = """
batch = 2
draft_vocab = 200
held_out = 0.2
trials = 1
trial_tokens = 6

[options]
taps = [1, 2, 3]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model", layers=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {i}"},
                {"role": "assistant", "content": " ".join(map(str, range(i)))},
            ]
        }
        for i in range(4, 14)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_every_kind_has_a_command() -> None:
    assert list(KINDS) == list(OBJECTIVES)


def test_a_draft_is_trained_and_can_be_used(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    out = tmp_path / "heads"
    files = ["--model", str(model), "--data", str(data), "--out", str(out)]
    run = ["train", "eagle3", *files, "--config", str(tmp_path / "recipe.toml"), "--tokens", "900"]
    assert main(run) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "draft vocabulary: 200 of 259 tokens, 100.0%" in said.err
    assert "plain decoding on 2 held-out prompts" in said.err
    assert (
        f"fastest here: forerun generate 'Why is the sky blue?' --model {model} --draft" in said.err
    )
    assert formats.family(out) == "eagle"
    generate = ["generate", "Hello", "--model", str(model), "--draft", f"eagle3:{out}"]
    assert main([*generate, "--max-tokens", "5"]) == 0
    assert main(run) == 1
    assert "is finished; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "10m", "--tokens", "5"], "give one of them"),
        (["--budget", "10"], "write a time"),
        (["--config", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_what_is_wrong_is_said(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "eagle3", "--data", "d", "--out", "o", *more]) == 1
    assert message in capsys.readouterr().err
