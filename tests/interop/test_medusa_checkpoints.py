"""Medusa checkpoints of all four layouts, in and out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from forerun.errors import CheckpointError, ConfigError
from forerun.interop import medusa
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.hub import load
from forerun.models.target import TargetInfo
from tiny import VOCAB, tiny_folder
from tiny_heads import tiny_medusa, tiny_medusa_module

STATES = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("medusa") / "model")


def logits(module: MedusaHeads, model: Path) -> torch.Tensor:
    head_VC = load_file(model / "model.safetensors")["lm_head.weight"]
    return module(STATES, lambda states: functional.linear(states, head_VC))


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def change_config(folder: Path, **values: object) -> None:
    (folder / "config.json").write_text(json.dumps(config(folder) | values))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    changed = load_file(path) | tensors
    save_file({name: t for name, t in changed.items() if t is not None}, path)


def doubts(folder: Path) -> list[str]:
    return [sentence for sentence in medusa.describe(folder) if sentence.startswith("! ")]


CASES = {
    "v1.3": ("medusa", {}),
    "v1.3, two layers": ("medusa", {"layers": 2, "heads": 2}),
    "v1.3, no layers": ("medusa", {"layers": 0, "bias": False}),
    "version 2": ("medusa", {"output": "target", "vocab_size": None}),
    "1.0": ("medusa2", {}),
    "1.0, the model's own head": ("medusa2", {"output": "target", "vocab_size": None}),
    "vllm": ("vllm", {"heads": 4}),
    "vllm, no biases": ("vllm", {"bias": False}),
    "vllm, one matrix": ("vllm", {"output": "one"}),
    "vllm, reduced": ("vllm", {"draft_vocab_size": 40}),
    "vllm, one reduced matrix": ("vllm", {"output": "one", "draft_vocab_size": 40}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read_back(model: Path, tmp_path: Path, case: str) -> None:
    layout, numbers = CASES[case]
    module = tiny_medusa_module(model, **numbers)
    medusa.export(module, layout, tmp_path / "out", str(model))
    assert medusa.detect(tmp_path / "out")
    again = medusa.read(tmp_path / "out")
    assert torch.equal(logits(again, model), logits(module, model))
    ignored = {"base_model", "own_backbone"}
    assert again.config.model_dump(exclude=ignored) == module.config.model_dump(exclude=ignored)
    if module.token_map is not None:
        assert torch.equal(again.token_map, module.token_map)


def test_types_are_kept(model: Path, tmp_path: Path) -> None:
    module = tiny_medusa_module(model).to(torch.bfloat16)
    medusa.export(module, "vllm", tmp_path / "out")
    assert {tensor.dtype for tensor in medusa.read(tmp_path / "out").parameters()} == {
        torch.bfloat16
    }
    read = medusa.read(tmp_path / "out", torch.float32)
    assert {tensor.dtype for tensor in read.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "through", [("medusa", "vllm"), ("medusa2", "medusa"), ("vllm", "medusa2")]
)
def test_layouts_turn_into_each_other(
    model: Path, tmp_path: Path, through: tuple[str, str]
) -> None:
    module = tiny_medusa_module(model, layers=2)
    one, other = tmp_path / "one", tmp_path / "other"
    medusa.export(module, through[0], one, str(model))
    medusa.export(
        medusa.read(one), through[1], other, str(model) if through[1] == "medusa2" else None
    )
    assert torch.equal(logits(medusa.read(other), model), logits(module, model))


def test_the_targets_head_goes_along_for_vllm_and_is_recognised(
    model: Path, tmp_path: Path
) -> None:
    module = tiny_medusa_module(model, output="target", vocab_size=None)
    medusa.export(module, "vllm", tmp_path / "vllm", str(model))
    stored = load_file(tmp_path / "vllm/model.safetensors")
    head_VC = load_file(model / "model.safetensors")["lm_head.weight"]
    assert torch.equal(stored["lm_heads.0.weight"], head_VC)
    assert config(tmp_path / "vllm")["original_lm_head"] is True
    back = medusa.read(tmp_path / "vllm")
    assert torch.equal(logits(back, model), logits(module, model))
    medusa.export(back, "medusa", tmp_path / "back", str(model))
    assert medusa.read(tmp_path / "back").config.output == "target"
    back.lm_heads[0].weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="export them as vllm"):
        medusa.export(back, "medusa", tmp_path / "no", str(model))


def test_the_names_are_the_published_ones(model: Path, tmp_path: Path) -> None:
    module = tiny_medusa_module(model, heads=2)
    for layout in medusa.LAYOUTS:
        medusa.export(module, layout, tmp_path / layout, str(model))
    tensors = torch.load(tmp_path / "medusa/medusa_lm_head.pt", weights_only=True)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"{i}.{name}": shape
        for i in range(2)
        for name, shape in (
            ("0.linear.weight", [32, 32]),
            ("0.linear.bias", [32]),
            ("1.weight", [VOCAB, 32]),
        )
    }
    stored = load_file(tmp_path / "medusa2/model.safetensors")
    backbone = load_file(model / "model.safetensors")
    assert {name for name in stored if not name.startswith("medusa_head.")} == set(backbone)
    assert torch.equal(stored["medusa_head.1.1.weight"], module.lm_heads[1].weight)
    assert config(tmp_path / "medusa2")["medusa_num_heads"] == 2
    assert (tmp_path / "medusa2/tokenizer.json").exists()
    assert set(load_file(tmp_path / "vllm/model.safetensors")) == {
        f"{name}"
        for i in range(2)
        for name in (
            f"blocks.{i}.layers.0.weight",
            f"blocks.{i}.layers.0.bias",
            f"lm_heads.{i}.weight",
        )
    }


def test_what_vllm_is_told(model: Path, tmp_path: Path) -> None:
    line = medusa.export(
        tiny_medusa_module(model, draft_vocab_size=40), "vllm", tmp_path, "org/model"
    )
    assert config(tmp_path) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "truncated_vocab_size": 40,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "base_model_name_or_path": "org/model",
    }
    options = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert line == (
        f"vllm serve org/model --speculative-config '{json.dumps(options)}' "
        """--model-loader-extra-config '{"enable_weights_track": false}'"""
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("sglang", "SGLang has no Medusa algorithm"),
        ("speculators", "knows no Medusa heads"),
        ("specforge", "knows no Medusa heads"),
        ("vlm", "did you mean 'vllm'?"),
    ],
)
def test_other_layouts_are_refused(model: Path, tmp_path: Path, layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        medusa.export(tiny_medusa_module(model), layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_layout_cannot_hold_is_refused(model: Path, tmp_path: Path) -> None:
    reduced = tiny_medusa_module(model, draft_vocab_size=40)
    with pytest.raises(ConfigError, match="part of the vocabulary"):
        medusa.export(reduced, "medusa", tmp_path / "out")
    shared = tiny_medusa_module(model, output="target", vocab_size=None)
    with pytest.raises(ConfigError, match="--target"):
        medusa.export(shared, "vllm", tmp_path / "out")
    with pytest.raises(ConfigError, match="--target"):
        medusa.export(shared, "medusa2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- strictness ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blocks.1.layers.0.bias": None}, "has no tensor 'blocks.1.layers.0.bias'"),
        ({"lm_heads.2.weight": None}, "has no tensor 'lm_heads.2.weight'"),
        ({"blocks.0.layers.0.weight": torch.zeros(32, 16)}, "has shape"),
        ({"blocks.1.layers.0.weight": torch.zeros(32, 16)}, "has shape"),
        ({"lm_heads.1.weight": torch.zeros(9, 32)}, "has shape"),
        ({"blocks.0.norm.weight": torch.zeros(32)}, "does not use: 'blocks.0.norm.weight'"),
    ],
)
def test_every_tensor_is_accounted_for(
    model: Path, tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    folder = tiny_medusa(tmp_path / "out", model)
    change_tensors(folder, **tensors)
    with pytest.raises(CheckpointError, match=message):
        medusa.read(folder)


def test_a_matrix_in_the_wrong_place_is_left_over(model: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "out", model, "medusa")
    path = folder / "medusa_lm_head.pt"
    tensors = torch.load(path, weights_only=True)
    tensors["0.2.weight"] = tensors.pop("0.1.weight")
    torch.save(tensors, path)
    with pytest.raises(CheckpointError, match=r"lm_heads\.0\.weight"):
        medusa.read(folder)


def test_nothing_is_unpickled(model: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "out", model, "medusa")
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match="take a safetensors version"):
        medusa.read(folder)


@pytest.mark.parametrize(
    ("ids", "message"),
    [(torch.tensor([0, 0]), "2 different tokens"), (torch.tensor([0, VOCAB]), "below")],
)
def test_a_wrong_token_map_is_refused(
    model: Path, tmp_path: Path, ids: torch.Tensor, message: str
) -> None:
    folder = tiny_medusa(tmp_path / "out", model, draft_vocab_size=2)
    change_tensors(folder, token_map=ids)
    with pytest.raises(CheckpointError, match=message):
        medusa.read(folder)


def test_reduced_rows_need_their_map(model: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "out", model)
    change_config(folder, truncated_vocab_size=40)
    with pytest.raises(CheckpointError, match="no token_map"):
        medusa.read(folder)


def test_whole_matrices_beside_a_map_are_cut(model: Path, tmp_path: Path) -> None:
    """As vLLM does."""
    whole = tiny_medusa_module(model)
    folder = tmp_path / "out"
    medusa.export(whole, "vllm", folder)
    ids = torch.tensor([7, 3, 200])
    change_tensors(folder, token_map=ids)
    kept = torch.stack([head.weight for head in medusa.read(folder).lm_heads])
    assert torch.equal(kept, torch.stack([head.weight[ids] for head in whole.lm_heads]))


def test_folders_of_others_are_none(model: Path, tmp_path: Path) -> None:
    assert not medusa.detect(model)
    assert not medusa.detect(tmp_path)
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        medusa.read(model)


# ---- describing and fitting ---------------------------------------------------------------------


def test_published_counts_are_not_believed(model: Path, tmp_path: Path) -> None:
    """The authors' own files say 2 heads and hold 5."""
    folder = tiny_medusa(tmp_path / "out", model, "medusa", heads=5)
    assert doubts(folder) == []
    change_config(folder, medusa_num_heads=2)
    assert medusa.read(folder).config.heads == 5
    assert doubts(folder) == [
        "! config.json says medusa_num_heads 2, the tensors say 5, which is used"
    ]


def test_describe(model: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "out", model)
    assert medusa.describe(folder) == [
        f"3 Medusa heads in vllm layout with an output matrix each over {VOCAB} tokens, made for "
        f"{model}",
        "each has 1 residual layer of width 32, with biases, on the target's last hidden state "
        "behind its final norm",
    ]
    change_config(folder, medusa_fc_bias=False, hidden_size=4096)
    assert [sentence[:30] for sentence in doubts(folder)] == [
        "! config.json says hidden_size",
        "! biases are stored but medusa",
    ]
    weights = load_file(folder / "model.safetensors")
    zero = {name: 0 * tensor for name, tensor in weights.items() if name.startswith("blocks")}
    change_tensors(folder, **zero, **{"lm_heads.0.weight": weights["lm_heads.0.weight"] / 0})
    assert any("not trained" in sentence for sentence in doubts(folder))
    assert any("not finite" in sentence for sentence in doubts(folder))
    assert any("first two heads are equal" in sentence for sentence in doubts(folder))


def test_what_vllm_cannot_load_is_said(model: Path, tmp_path: Path) -> None:
    one = tiny_medusa(tmp_path / "one", model, output="one", draft_vocab_size=40)
    assert [sentence[:20] for sentence in doubts(one)] == ["! vLLM 0.32 loads a "]
    each = tiny_medusa(tmp_path / "each", model, draft_vocab_size=40)
    assert [sentence[:20] for sentence in doubts(each)] == ["! vLLM 0.32 cannot l"]


def info(name: str, **sizes: int) -> TargetInfo:
    values: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "layers": 2, **sizes}
    return TargetInfo(
        name=name,
        architecture="llama",
        max_length=512,
        dtype=torch.float32,
        device=torch.device("cpu"),
        row_invariant=True,
        tree_invariant=True,
        **values,
    )


def test_misfits_are_named(model: Path, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "out", model)
    assert medusa.describe(folder, info("fits")) == medusa.describe(folder)
    (wide,) = medusa.misfits(medusa.read(folder).config, folder, info("wide", hidden_size=64))
    assert "size 32, wide has 64" in wide
    (other,) = medusa.misfits(medusa.read(folder).config, folder, info("other", vocab_size=9))
    assert f"{VOCAB} tokens, other has 9" in other


def test_medusa_2_is_a_model_and_its_heads_fit_no_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_medusa(tmp_path / "out", model, "medusa2")
    loaded = load(str(folder), dtype="float32", device="cpu")
    assert f"medusa:{folder} drafts for it" in capsys.readouterr().err
    heads = medusa.read(folder).config
    assert heads.own_backbone
    assert medusa.misfits(heads, folder, loaded.target.info) == []
    (refusal,) = medusa.misfits(heads, folder, info(str(model)))
    assert f"use --model {folder}" in refusal
    assert any("Medusa-2" in sentence for sentence in medusa.describe(folder))
    load(str(model), dtype="float32", device="cpu")
    assert capsys.readouterr().err == "", "other models say nothing of heads"
