"""Draft checkpoints of all families through one door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError
from forerun.interop import formats
from tiny import tiny_llama
from tiny_heads import tiny_dflash, tiny_eagle, tiny_medusa

FOLDERS = {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle", "dflash": "dflash"}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    target = tiny_llama(folder / "target", layers=4)
    tiny_medusa(folder / "medusa", folder / "target")
    tiny_eagle(folder / "eagle", target, "eagle")
    tiny_eagle(folder / "eagle3", target, "eagle3")
    tiny_dflash(folder / "dflash", target.target.info, anchor_first=False)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_every_family_is_found_described_and_written(
    drafts: Path, tmp_path: Path, name: str
) -> None:
    assert formats.family(drafts / name) == FOLDERS[name]
    assert not formats.is_model(drafts / name)
    assert formats.describe(drafts / name)
    line = formats.export("vllm", drafts / name, tmp_path / "out", "org/model")
    assert line.startswith("vllm serve org/model")
    assert formats.family(tmp_path / "out") == FOLDERS[name]


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_keep_their_type(drafts: Path, tmp_path: Path, name: str) -> None:
    half = tmp_path / "half"
    formats.export("vllm", drafts / name, half)
    path = half / "model.safetensors"
    halved = {
        key: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for key, tensor in load_file(path).items()
    }
    save_file(halved, path)
    formats.export("vllm", half, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in written.items()} == {
        key: tensor.dtype for key, tensor in halved.items()
    }
    assert all(torch.equal(tensor, halved[key]) for key, tensor in written.items())


def test_other_folders_are_refused(drafts: Path, tmp_path: Path) -> None:
    for folder in (drafts / "target", tmp_path, tmp_path / "missing"):
        assert formats.family(folder) is None
        with pytest.raises(CheckpointError, match="no draft of a known family"):
            formats.describe(folder)


def without(folder: Path, out: Path, tensor: str) -> Path:
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    del weights[tensor]
    save_file(weights, out / "model.safetensors")
    return out


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_a_draft_that_lacks_any_tensor_is_still_known(
    drafts: Path, tmp_path: Path, name: str
) -> None:
    for index, tensor in enumerate(load_file(drafts / name / "model.safetensors")):
        if tensor in ("lm_head.weight", "t2d", "d2t"):
            continue  # optional, as far as the tensors tell
        folder = without(drafts / name, tmp_path / str(index), tensor)
        assert formats.family(folder) == FOLDERS[name]
        with pytest.raises(CheckpointError, match=tensor.removeprefix("midlayer.")):
            formats.describe(folder)


def test_damaged_files_are_named_in_export(drafts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "config.json").write_text((drafts / "eagle" / "config.json").read_text())
    whole = (drafts / "eagle" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        formats.export("vllm", folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eagle_config": [1]}, "eagle_config is no object"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "taps"),
        ({"speculators_model_type": "mtp"}, "type 'mtp'"),
    ],
)
def test_configs_that_make_no_sense_are_named(
    drafts: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "model.safetensors").symlink_to(drafts / "eagle3" / "model.safetensors")
    config = json.loads((drafts / "eagle3" / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        formats.describe(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
