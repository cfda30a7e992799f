"""`forerun models` and `forerun inspect`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.home import cache_folder
from forerun.models import packaged
from tiny import VOCAB, tiny_folder

CONTENT = b"GGUF"


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home without models, and a model of few bytes."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    small = {"bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
    model = replace(packaged.find("smollm2-135m"), **small)  # type: ignore[arg-type]
    monkeypatch.setitem(packaged.MODELS, model.name, model)


def put(name: str) -> Path:
    """Pretend that a model has been pulled."""
    place = cache_folder() / "models" / packaged.find(name).file
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    return place


def test_list_tells_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    put("smollm2-135m")
    assert main(["models", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["smollm2-135m"].endswith("here")
    assert lines["gemma3-270m"].endswith("MB to fetch")


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    place = put("smollm2-135m")
    assert main(["models", "list", "--json"]) == 0
    paths = {model["name"]: model["path"] for model in json.loads(capsys.readouterr().out)}
    assert paths == {"smollm2-135m": str(place), "gemma3-270m": None}


def test_path_and_pull_of_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    place = put("smollm2-135m")
    for command in ("path", "pull"):
        assert main(["models", command, "smollm2-135m"]) == 0
        out, err = capsys.readouterr()
        assert (out, err) == (f"{place}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "path", "smollm2-135m"], "run: forerun models pull smollm2-135m"),
        (["models", "path", "smollm"], "did you mean 'smollm2-135m'?"),
        (["models", "pull", "gemma-270m"], "did you mean 'gemma3-270m'?"),
        (["inspect", "smollm2-135m"], "not here yet; run: forerun models pull smollm2-135m"),
        (["inspect", "smollm"], "did you mean 'smollm2-135m'?"),
        (["inspect", "/no/such/folder"], "check the path"),
    ],
)
def test_failures_end_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def inspected(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, object]:
    assert main(["inspect", str(folder), "--json"]) == 0
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


def test_inspect_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    facts = inspected(capsys, folder)
    assert facts["runs_with"] == "forerun's own decoder"
    assert (facts["architecture"], facts["layers"], facts["hidden_size"]) == ("llama", 2, 32)
    assert (facts["vocab_size"], facts["context"], facts["tokenizer"]) == (VOCAB, 512, VOCAB)
    layer = 2 * 64 * 32 + 2 * 32 * 32 + 3 * 48 * 32 + 2 * 32
    assert facts["parameters"] == 2 * VOCAB * 32 + 32 + 2 * layer
    assert (facts["dtype"], facts["chat_template"]) == ("float32", True)
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"parameters     {facts['parameters']:,}" in lines
    assert "chat template  yes" in lines


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_inspect_what_our_decoder_does_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "model")
    change_config(folder, hidden_act="relu")
    assert str(inspected(capsys, folder)["runs_with"]).startswith("nothing: ")
    change_config(folder, model_type="gpt_neox")
    assert str(inspected(capsys, folder)["runs_with"]).startswith("transformers")
    for kind, reason in (("mamba", "recurrent state"), ("foo", "'foo'"), ("t5", "'t5'")):
        change_config(folder, model_type=kind)
        runs_with = str(inspected(capsys, folder)["runs_with"])
        assert runs_with.startswith("nothing: ")
        assert reason in runs_with


def test_inspect_without_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert str(inspected(capsys, folder)["tokenizer"]).startswith("none: ")
