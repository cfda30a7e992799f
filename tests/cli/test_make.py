"""`forerun export`, and `forerun inspect` of drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.drafters import static_tree
from forerun.interop import formats, medusa
from tiny import VOCAB, tiny_folder
from tiny_heads import tiny_medusa


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("make") / "model")


@pytest.fixture(scope="module")
def heads(model: Path) -> Path:
    return tiny_medusa(model.parent / "heads", model, "medusa")


def test_export_writes_a_folder_and_prints_a_command_line(
    heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", "vllm", str(heads), str(out), "--target", "org/model"]) == 0
    printed, err = capsys.readouterr()
    assert printed.startswith("vllm serve org/model --speculative-config '{")
    assert str(out) in printed
    assert err == ""
    assert formats.family(out) == "medusa"
    assert medusa.read(out).config.heads == medusa.read(heads).config.heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "sglang", "HEADS", "OUT"], "SGLang has no Medusa algorithm"),
        (["export", "vlm", "HEADS", "OUT"], "did you mean 'vllm'?"),
        (["export", "vllm", "MODEL", "OUT"], "holds no draft of a known family"),
        (["export", "vllm", "/no/such/folder", "OUT"], "holds no draft of a known family"),
        (["export", "vllm", "HEADS", "HEADS"], "exists already"),
        (["export", "vllm", "HEADS", "FILE/out"], "cannot be written"),
        (["inspect", "MODEL", "--target", "MODEL"], "is no draft"),
        (["inspect", "HEADS", "--target", "/no/such/folder"], "check the path"),
        (["inspect", "HEADS", "--tree", "OUT"], "give --target"),
        (["inspect", "MODEL", "--tree", "OUT"], "only Medusa heads draft trees of fixed shape"),
        (["inspect", "HEADS", "--target", "MODEL", "--tree", "FILE/out"], "cannot be written"),
    ],
)
def test_failures_end_in_one_line(
    model: Path,
    heads: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    file = tmp_path / "file"
    file.touch()
    places = {"HEADS": heads, "MODEL": model, "OUT": tmp_path / "out", "FILE/out": file / "out"}
    assert main([str(places.get(argument, argument)) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "out").exists()


def test_inspect_a_draft(
    model: Path, heads: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["inspect", str(heads)]) == 0
    plain = capsys.readouterr().out
    assert "draft          medusa" in plain
    assert f"an output matrix each over {VOCAB} tokens" in plain
    assert main(["inspect", str(heads), "--target", str(model), "--files-only"]) == 0
    assert capsys.readouterr().out == plain, "it fits"
    wide = tiny_folder(tmp_path / "other", vocab=VOCAB + 1)
    assert main(["inspect", str(heads), "--target", str(wide), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["draft"] == "medusa"
    assert any(f"has {VOCAB + 1}" in s for s in facts["about"] if s.startswith("! "))
    assert facts["tried"] is None


def test_inspect_tries_a_draft_on_its_target(
    model: Path, heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(heads), "--target", str(model)]) == 0
    out = capsys.readouterr().out
    assert "tried on 183 places in greedy answers of" in out
    assert "\n! with heads read as guessing 0, 0, 0 places on" in out
    assert main(["inspect", str(heads), "--target", str(model), "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)["tried"]
    assert tried["places"] == 183
    assert len(tried["right"]) == 3
    assert all(0 <= share < 0.6 for share in tried["right"])
    assert "guessing 0, 0, 0" in tried["better"]


def test_inspect_writes_the_best_fixed_tree_for_what_it_measured(
    model: Path, heads: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tree.json"
    command = ["inspect", str(heads), "--target", str(model), "--tree", str(file), "--nodes", "5"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    measured = facts["tried"]["right_by_rank"]
    assert [row[0] for row in measured] == pytest.approx(facts["tried"]["right"], abs=1e-4)
    paths = json.loads(file.read_text())
    assert paths == static_tree.optimal(measured, 5)
    tokens = static_tree.expected_tokens(paths, measured)
    assert f"{tokens:.2f} tokens a step" in facts["about"][-1]
    spec = f"medusa:{heads},tree={file}"
    prompt = ["generate", "Hello", "--model", str(model), "--max-tokens", "4", "--draft", spec]
    assert main(prompt) == 0


def test_inspect_a_model_that_brings_its_heads(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tiny_medusa(tmp_path / "both", model, "medusa2")
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "runs with      forerun's own decoder" in out
    assert "trained together with them (Medusa-2)" in out
