"""Drafts that come with forerun: their names, where they lie, and that they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.cli.main import main
from forerun.config import Settings
from forerun.drafters import check
from forerun.errors import ConfigError
from forerun.interop import formats, lent, shipped
from forerun.models import packaged
from forerun.models.hub import load
from forerun.train.vocabulary import Vocabulary
from tiny import VOCAB, tiny_folder
from tiny_corpus import tiny_corpus
from training import objective

NAME = "smollm2-135m"
MOST_BYTES = 40_000_000


@pytest.fixture
def drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A forerun that ships two drafts for the model in ./model."""
    model = load(str(tiny_folder(tmp_path / "model", layers=4)), "float32", "cpu")
    place = tmp_path / "drafts" / NAME
    tiny_corpus(place / "corpus", model, ["abc"])
    made = objective("medusa", model, Vocabulary(torch.arange(0, 250, 2), VOCAB))
    made.save(tmp_path / "heads", made.network.state_dict())
    formats.export("forerun", tmp_path / "heads", place / "medusa", str(tmp_path / "model"))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "drafts")
    monkeypatch.chdir(tmp_path)
    return place


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    return code, *capsys.readouterr()


def test_specs_name_them(drafts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("medusa", "corpus"):
        for spec in (f"{kind}:{NAME}", f"{kind}:{drafts / kind}"):
            code, out, err = run(
                capsys, "generate", "abc", "--model", "model", "--draft", spec, "--max-tokens", "4"
            )
            assert (code, err) == (0, ""), spec
            assert out


def test_auto_is_what_ships_and_one_network(
    drafts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [kind for kind, _ in _checked("auto")] == ["corpus", "medusa"]
    (drafts / "eagle3").mkdir()
    kinds = [(kind, getattr(options, "top_k", None)) for kind, options in _checked("auto")]
    assert kinds == [("corpus", None), ("eagle3", 4)]
    (drafts / "eagle3").rmdir()
    (drafts.parent / NAME).rename(drafts.parent / "model")
    code, out, err = run(capsys, "generate", "abc", "--model", "model", "--draft", "auto")
    assert (code, err) == (0, "")
    assert out
    assert [kind for kind, _ in _checked("auto")] == ["suffix"], "nothing ships for it now"
    assert [kind for kind, _ in _checked("ngram+auto")] == ["ngram", "suffix"]


def _checked(spec: str) -> list[tuple[str, Settings]]:
    return [(kind.name, options) for kind, options in check(spec, NAME)]


def test_a_path_of_the_same_name_goes_first(drafts: Path) -> None:
    assert shipped.locate("medusa", NAME) == drafts / "medusa"
    Path(NAME).mkdir()
    assert shipped.locate("medusa", NAME) == Path(NAME)
    assert shipped.place(f"medusa:{NAME}") == Path(NAME)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--model", "NOT THERE", "--draft", "medusa:smollm"),
        ("generate", "x", "--model", "NOT THERE", "--draft", "eagle3:smollm2-135m"),
        ("generate", "x", "--model", "NOT THERE", "--draft", "corpus:smollm"),
        ("inspect", "dflash:smollm2-135m"),
        ("export", "vllm", "medusa:smollm", "out"),
    ],
)
def test_a_wrong_name_lists_what_ships(
    drafts: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """And that before the model is looked for."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.endswith(f"or one that ships: corpus:{NAME}, medusa:{NAME}\n")


def test_shape_is_looked_at_before_the_model_is_loaded(
    drafts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("forerun.models.hub.load", refuse)
    tiny_folder(Path("other"), vocab=VOCAB + 1, layers=4)
    code, _, err = run(capsys, "generate", "x", "--model", "other", "--draft", f"medusa:{NAME}")
    assert code == 1
    assert f"were made for {VOCAB} tokens, other has {VOCAB + 1}" in err


def test_they_are_described_and_exported(drafts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "inspect", f"medusa:{NAME}")
    assert "without lm_heads.0.weight, whose rows are taken from the head of" in out
    assert "'forerun export' writes it out whole" in out
    code, _, _ = run(capsys, "export", "vllm", f"medusa:{NAME}", "out", "--target", "model")
    assert code == 0
    assert (Path("out") / "model.safetensors").exists()


def test_a_corpus_is_described(drafts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", f"corpus:{NAME}", "--target", "model")
    assert code == 0
    assert "draft          corpus" in out
    assert f"for its vocabulary of {VOCAB} tokens" in out
    assert "contexts of up to 4 tokens with" in out
    assert "! " not in out
    tiny_folder(Path("other"), vocab=VOCAB + 1)
    _, out, _ = run(capsys, "inspect", str(drafts / "corpus"), "--target", "other")
    assert "\n! it was made for another tokenizer" in out


def test_list_names_them(drafts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "list")
    assert f"drafts that come with forerun: corpus:{NAME}, medusa:{NAME}\n" in out


# ---- those that really ship ---------------------------------------------------------------------


def test_all_that_ships_is_known_and_small() -> None:
    for kind, model, place in shipped.every():
        assert model in packaged.MODELS
        assert kind == "corpus" or lent.lent(place), f"{place} holds rows of its target"
    names = {place.name for place in shipped.FOLDER.glob("*/*")}
    assert names <= {*shipped.KINDS, "README.md"}
    files = [path for path in shipped.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_the_best_are_there() -> None:
    for model, spec in shipped.BEST.items():
        for kind, options in check(spec, model):
            kind.look(options, lambda: None)
            assert model in packaged.MODELS


@pytest.mark.real
def test_they_fit_their_models() -> None:
    for kind, model, place in shipped.every():
        if packaged.path(model) and kind != "corpus":
            doubts = [said for said in formats.describe(place) if said.startswith("! ")]
            assert all("vLLM 0.32 loads" in doubt for doubt in doubts), doubts


def test_no_such_draft_raises() -> None:
    with pytest.raises(ConfigError, match="no eagle3 draft 'x'"):
        shipped.locate("eagle3", "x")
