from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import tiny_gguf
from forerun.interop.model_folder import write_model
from forerun.models.hub import LoadedModel, load
from forerun.models.target import Segment


def logits(model: LoadedModel, tokens: list[int]) -> Tensor:
    store = model.target.new_store(64)
    span = store.open()
    store.reserve(span, len(tokens))
    return model.target.forward([Segment(span, tokens)], store).logits_NV


def test_a_gguf_file_as_a_folder_is_the_same_model(tmp_path: Path) -> None:
    state = {name: t.bfloat16().float() for name, t in tiny_gguf.random_state().items()}
    extra = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.chat_template": "{{ messages }}"}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", state, extra=extra)
    write_model(path, tmp_path / "new", {}, {"medusa_num_heads": 2})
    file, folder = load(str(path), "float32", "cpu"), load(str(tmp_path / "new"), "float32", "cpu")
    tokens = list(range(20))
    assert torch.equal(logits(file, tokens), logits(folder, tokens))
    assert file.stop_ids == folder.stop_ids == {2, 5}
    assert file.tokenizer.encode("abc") == folder.tokenizer.encode("abc")
    assert file.tokenizer.special_tokens == folder.tokenizer.special_tokens
    assert folder.tokenizer.chat_template
    assert folder.tokenizer.chat_template.source == "{{ messages }}"


def test_tensors_take_the_place_of_others(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state())
    name = "model.layers.0.self_attn.q_proj.weight"
    other = tiny_gguf.random_state(seed=1)[name]
    write_model(path, tmp_path / "new", {name: other}, {})
    whole = tiny_gguf.random_state() | {name: other}
    rounded = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    expected = load(str(tiny_gguf.write_gguf(tmp_path / "e.gguf", rounded)), "float32", "cpu")
    found = load(str(tmp_path / "new"), "float32", "cpu")
    assert torch.equal(logits(found, [1, 2, 3]), logits(expected, [1, 2, 3]))
