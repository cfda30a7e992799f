"""Draft checkpoints of all families through one door."""

from __future__ import annotations

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
