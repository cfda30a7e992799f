"""Weights by their published names: safetensors, pickles and GGUF, strict about all of them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny_gguf
from forerun.errors import CheckpointError
from forerun.models import gguf_file
from forerun.models.gguf_file import GGUFFile
from forerun.models.weights import Weights, folder_weights, gguf_weights

FLOAT = torch.float32


def tensors() -> dict[str, Tensor]:
    return {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(5)}


def taken(weights: Weights, state: dict[str, Tensor]) -> None:
    """Every tensor of `state` is in `weights`, bit for bit, and nothing else is."""
    for name, tensor in state.items():
        assert torch.equal(weights.take(name, *tensor.shape), tensor), name
    weights.finish()


def test_one_safetensors_file(tmp_path: Path) -> None:
    state = tensors()
    save_file(state, tmp_path / "model.safetensors")
    taken(folder_weights(tmp_path, FLOAT), state)


def test_tensors_come_in_the_type_asked_for(tmp_path: Path) -> None:
    state = tensors()
    save_file(state, tmp_path / "model.safetensors")
    half = folder_weights(tmp_path, torch.bfloat16).take("a.weight", 4, 3)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, state["a.weight"].bfloat16())


def sharded(folder: Path) -> dict[str, Tensor]:
    state = tensors()
    weight_map = {}
    for i, name in enumerate(state):
        weight_map[name] = f"part{i}.safetensors"
        save_file({name: state[name]}, folder / weight_map[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return state


def test_shards(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    taken(folder_weights(tmp_path, FLOAT), state)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks part1\.safetensors"):
        folder_weights(tmp_path, FLOAT)


@pytest.mark.parametrize("content", ['{"weight', "[]", "{}", '{"weight_map": {"a": 5}}'])
def test_a_damaged_index(tmp_path: Path, content: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        folder_weights(tmp_path, FLOAT)


def test_a_pickle_of_plain_tensors(tmp_path: Path) -> None:
    state = tensors()
    torch.save(state, tmp_path / "pytorch_model.bin")
    taken(folder_weights(tmp_path, FLOAT), state)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="take a safetensors version"):
        folder_weights(tmp_path, FLOAT)


@pytest.mark.parametrize("size", [0, 50])
def test_a_pickle_cut_short(tmp_path: Path, size: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="cut short, damaged or older than torch"):
        folder_weights(tmp_path, FLOAT)


@pytest.mark.parametrize("pickled", [False, True])
def test_integers_are_no_weights(tmp_path: Path, pickled: bool) -> None:
    """Without the scale that belongs to them."""
    state = {"a.weight": torch.ones(4, 3, dtype=torch.int8), "b.weight": torch.ones(5).half()}
    if pickled:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    weights = folder_weights(tmp_path, FLOAT)
    assert torch.equal(weights.take("b.weight", 5), torch.ones(5))
    with pytest.raises(CheckpointError, match=r"'a\.weight' is stored as int8"):
        weights.take("a.weight", 4, 3)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        folder_weights(tmp_path, FLOAT)


def test_a_missing_tensor(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'c\.weight'; the file is incomplete"):
        folder_weights(tmp_path, FLOAT).take("c.weight", 4, 3)


def test_wrong_shape(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \[4, 3\], the config asks for \[3, 4\]"):
        folder_weights(tmp_path, FLOAT).take("a.weight", 3, 4)


def test_leftovers_are_named(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    weights = folder_weights(tmp_path, FLOAT)
    weights.take("a.weight", 4, 3)
    with pytest.raises(CheckpointError, match=r"does not use: 'b\.weight'"):
        weights.finish()


def test_computed_buffers_of_old_checkpoints_may_be_left(tmp_path: Path) -> None:
    state = tensors()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(state | buffer, tmp_path / "model.safetensors")
    taken(folder_weights(tmp_path, FLOAT), state)


@pytest.mark.parametrize("kept", [0, 5, 60, 150])
def test_cut_safetensors(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        folder_weights(tmp_path, FLOAT)


# GGUF -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_gguf_gives_back_what_was_converted(tmp_path: Path, architecture: str) -> None:
    state = tiny_gguf.random_state("gemma3" if architecture != "llama" else "llama")
    if architecture != "gemma3":
        state = {name: tensor for name, tensor in state.items() if "feedforward" not in name}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", state, architecture)
    weights = gguf_weights(GGUFFile(path), FLOAT)
    for name, tensor in state.items():
        back = weights.take(name, *tensor.shape)
        # 1 + weight - 1 costs the last bits of the norms of Gemma
        exact = not (architecture == "gemma3" and name.endswith("norm.weight"))
        assert torch.equal(back, tensor) if exact else torch.allclose(back, tensor, atol=1e-6), name
    weights.finish()


def test_gemma_norms_in_bf16_are_the_published_ones(tmp_path: Path) -> None:
    state = {name: t.bfloat16().float() for name, t in tiny_gguf.random_state("gemma3").items()}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", state, "gemma3")
    norm = gguf_weights(GGUFFile(path), torch.bfloat16).take("model.norm.weight", tiny_gguf.HIDDEN)
    assert torch.equal(norm.float(), state["model.norm.weight"])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_gguf_blocks_are_decoded_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 3 * tiny_gguf.HIDDEN)  # several pieces, the last short
    state = tiny_gguf.random_state()
    quantisation = gguf.GGMLQuantizationType[kind]
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", state, quantisation=quantisation)
    name = "model.embed_tokens.weight"
    packed = gguf.quants.quantize(state[name].numpy(), quantisation)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, quantisation))
    assert not torch.equal(expected, state[name])
    weights = gguf_weights(GGUFFile(path), FLOAT)
    assert torch.equal(weights.take(name, *expected.shape), expected)


def test_gguf_header_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    extra = {"general.languages": ["en", "de"], "x.flags": [True, False], "x.small": -1.5}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state(), extra=extra)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {n: t.offset for n, t in ours.tensors.items()} == {
        t.name: t.data_offset for t in theirs.tensors
    }


def test_cut_gguf_files(tmp_path: Path) -> None:
    """Wherever a file ends, one line says so; a file of zeros of the same length, too."""
    whole = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state()).read_bytes()
    GGUFFile(tmp_path / "m.gguf")
    cut = tmp_path / "cut.gguf"
    for kept in [0, 3, 4, 7, 8, 12, 24, 30, 100, *range(200, len(whole), 7919), len(whole) - 1]:
        cut.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(cut)
        assert "\n" not in str(caught.value)


def test_damaged_gguf_headers(tmp_path: Path) -> None:
    """A flipped byte in the header is an error or another value, never a crash."""
    whole = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state()).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for place in range(0, 1500, 11):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            GGUFFile(damaged)
        except CheckpointError:
            refused += 1
    assert refused > 20


def test_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        GGUFFile(path)


def test_unknown_gguf_tensors_are_left_over(tmp_path: Path) -> None:
    state = tiny_gguf.random_state()
    extra = {"blk.0.attn_sinks.weight": torch.ones(4)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", state, extra_tensors=extra)
    weights = gguf_weights(GGUFFile(path), FLOAT)
    for name, tensor in state.items():
        weights.take(name, *tensor.shape)
    with pytest.raises(CheckpointError, match="attn_sinks"):
        weights.finish()
