"""Drafts that leave out what their target has anyway: the same to the bit, and for it alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.errors import CheckpointError, ConfigError, ForerunError
from forerun.interop import formats, lent
from forerun.models.hub import LoadedModel, load
from forerun.train.vocabulary import Vocabulary
from tiny import VOCAB, tiny_folder
from training import objective

KINDS = ("eagle3", "medusa", "dflash")
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"taps": (1, 2, 3)},
    "medusa": {},
    "dflash": {"taps": (1, 2, 3), "mask_token": VOCAB - 1},
}
SHARED = {"eagle3": "lm_head.weight", "medusa": "lm_heads.0.weight", "dflash": "lm_head.weight"}
REDUCED = Vocabulary(torch.arange(0, 250, 2), VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("lent") / "model", layers=4, seed=1)


@pytest.fixture(scope="module")
def target(model: Path) -> LoadedModel:
    return load(str(model), "bfloat16", "cpu")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(kind: str, model: Path, target: LoadedModel) -> Path:
    """As training leaves it, for a part of the vocabulary."""
    folder = model.parent / kind
    made = objective(kind, target, REDUCED, **OPTIONS[kind])
    made.save(folder, made.network.state_dict())
    return folder


@pytest.fixture(scope="module")
def small(kind: str, whole: Path, model: Path) -> Path:
    folder = model.parent / f"{kind}-small"
    line = formats.export("forerun", whole, folder, str(model))
    assert line == f'forerun generate "PROMPT" --model {model} --draft {kind}:{folder}'
    return folder


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def answer(model: LoadedModel, draft: str | None) -> list[int]:
    llm = LLM(model, draft=draft, kv_tokens=256)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return llm.generate("abcabcabc", params)[0].outputs[0].token_ids


def test_what_is_left_out_comes_back_to_the_bit(
    kind: str, whole: Path, small: Path, model: Path, tmp_path: Path
) -> None:
    stored, kept = load_file(whole / "model.safetensors"), load_file(small / lent.FILE)
    assert set(stored) - set(kept) == {SHARED[kind]}
    assert size(small) < size(whole) - stored[SHARED[kind]].nbytes + 2000
    formats.export("vllm", small, tmp_path / "out", str(model))
    formats.export("vllm", whole, tmp_path / "same", str(model))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_drafts_what_the_whole_one_drafts(
    kind: str, whole: Path, small: Path, model: Path, dtype: str
) -> None:
    """In float32, too, the rows are those that were left out: rounded to bfloat16."""
    loaded = load(str(model), dtype, "cpu")
    number = loaded.target.info.dtype
    files = formats.FAMILIES["eagle" if kind == "eagle3" else kind]
    one, other = files.read(whole, number), files.read(small, number, str(model))
    assert all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items()
    )
    assert answer(loaded, f"{kind}:{small}") == answer(loaded, None)


def test_described_with_its_target_found_by_name(small: Path, kind: str) -> None:
    (said,) = [each for each in formats.describe(small) if "runs on that model alone" in each]
    assert said.startswith(f"without {SHARED[kind]}, whose rows are taken from the head of ")


def other_model(model: Path, tmp_path: Path, **numbers: Any) -> Path:
    return tiny_folder(tmp_path / "other", **{"layers": 4, "seed": 2, **numbers})


@pytest.mark.parametrize("numbers", [{}, {"vocab": 300}])
def test_on_another_model_it_is_refused(
    small: Path, kind: str, model: Path, tmp_path: Path, numbers: dict[str, Any]
) -> None:
    other = other_model(model, tmp_path, **numbers)
    with pytest.raises(ForerunError) as refused:
        LLM(load(str(other), "bfloat16", "cpu"), draft=f"{kind}:{small}")
    assert "\n" not in str(refused.value)
    assert "choose" in str(refused.value)
    for act in (
        lambda: formats.export("vllm", small, tmp_path / "out", str(other)),
        lambda: formats.FAMILIES[formats.family(small)].read(small, None, str(other)),  # type: ignore[index]
    ):
        with pytest.raises(CheckpointError, match=r"made for .*model and takes rows .*other"):
            act()
    assert not (tmp_path / "out").exists()


def test_one_bit_of_a_row_is_noticed(small: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    row = weights["lm_head.weight"].bfloat16()
    row.view(torch.int16)[2, 0] ^= 1
    save_file(weights | {"lm_head.weight": row.float()}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match="choose a draft that was made for this model"):
        formats.export("vllm", small, tmp_path / "out", str(other))


def changed(small: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(small, out)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def unmarked(config: dict[str, Any]) -> None:
    del config[lent.KEY]


def nothing_left_out(config: dict[str, Any]) -> None:
    config[lent.KEY]["tensors"] = {}


def stored_too(config: dict[str, Any]) -> None:
    tensors = config[lent.KEY]["tensors"]
    tensors["layers.0.mlp.up_proj.weight"] = next(iter(tensors.values()))
    tensors["blocks.0.layers.0.weight"] = next(iter(tensors.values()))
    tensors["midlayer.mlp.up_proj.weight"] = next(iter(tensors.values()))


def unused(config: dict[str, Any]) -> None:
    tensors = config[lent.KEY]["tensors"]
    tensors["another.weight"] = next(iter(tensors.values()))


def mistyped(config: dict[str, Any]) -> None:
    config[lent.KEY]["traget"] = "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unmarked, "no weights"),
        (nothing_left_out, "lm_head|output matrix"),
        (stored_too, "is stored, but config.json says|has tensors that this architecture"),
        (unused, "another.weight"),
        (mistyped, "traget"),
    ],
)
def test_a_marker_that_does_not_match_is_an_error(
    small: Path,
    model: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    folder = changed(small, tmp_path / "changed", change)
    with pytest.raises(ForerunError, match=message) as refused:
        formats.export("vllm", folder, tmp_path / "out", str(model))
    assert "\n" not in str(refused.value)


def test_other_engines_find_no_weights(small: Path, whole: Path) -> None:
    """They would take a missing output matrix for the target's own."""
    assert not list(small.glob("model*")) + list(small.glob("pytorch*"))
    assert {path.name for path in small.iterdir()} == {"config.json", lent.FILE}


def test_what_cannot_be_left_out_is_said(
    whole: Path, small: Path, model: Path, tmp_path: Path
) -> None:
    other = other_model(model, tmp_path)
    for draft, target, message in (
        (whole, None, "name it with --target"),
        (whole, str(other), "no matrix that is rows of"),
        (small, str(model), "already"),
    ):
        with pytest.raises(ConfigError, match=message):
            formats.export("forerun", draft, tmp_path / "out", target)
        assert not (tmp_path / "out").exists()


def test_an_embedding_is_left_out_too(model: Path, tmp_path: Path) -> None:
    """speculators drafts carry a copy of the target's."""
    target = load(str(model), "float32", "cpu")
    made = objective("eagle3", target, REDUCED, **OPTIONS["eagle3"])
    made.save(tmp_path / "draft", made.network.state_dict())
    formats.export("speculators", tmp_path / "draft", tmp_path / "whole", str(model))
    formats.export("forerun", tmp_path / "whole", tmp_path / "small", str(model))
    kept = load_file(tmp_path / "small" / lent.FILE)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(kept)
    formats.export("speculators", tmp_path / "small", tmp_path / "back", str(model))
    whole, back = (tmp_path / name / "model.safetensors" for name in ("whole", "back"))
    assert back.read_bytes() == whole.read_bytes()
