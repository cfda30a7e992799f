"""Models of transformers over packed trees: as plain passes, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import tiny
from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.models.hub import load
from forerun.models.target import Segment
from forerun.models.transformers_target import TransformersTarget

LAYERS, HIDDEN, VOCAB = 3, 32, 96
OLD = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
NEW = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 6, "head_dim": 8}
RUN: dict[str, dict[str, Any]] = {
    "gpt2": OLD,
    "gpt_neox": {k: v for k, v in NEW.items() if k != "num_key_value_heads"},
    "opt": {**NEW, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "phi": NEW,
    # sliding and full layers, soft-caps; experts, sinks; parallel blocks and scaled logits
    "gemma2": NEW | WINDOW,
    "gpt_oss": NEW | WINDOW | {"num_local_experts": 4},
    "cohere": NEW,
    "gpt_bigcode": OLD,
}


def build(kind: str, settings: dict[str, Any], seed: int = 0) -> Any:
    """A random model whose attention matters: weights ten times as large as fresh ones."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


@pytest.fixture(scope="module", params=RUN)
def target(request: pytest.FixtureRequest) -> TransformersTarget:
    return TransformersTarget(build(request.param, RUN[request.param]), request.param)


@torch.no_grad()
def plain(target: TransformersTarget, tokens: list[int]) -> torch.Tensor:
    """Logits of one ordinary pass without a cache."""
    logits: torch.Tensor = target.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


PREFIX = [5, 17, 3, 88, 41, 9, 60, 2, 33]  # longer than the windows
TREE, PARENTS = [7, 8, 9, 10, 11, 12], [-1, 0, 0, -1, 2, 3]
PATHS = {1: [7, 8], 4: [7, 9, 11], 5: [10, 12]}  # last row of each path -> its tokens


def test_trees_are_their_paths(target: TransformersTarget) -> None:
    store = target.new_store(512)
    other, span = store.open(), store.open()
    for use in (other, span):
        store.reserve(use, 64)
    close(target.forward([Segment(span, PREFIX)], store).logits_NV, plain(target, PREFIX))
    store.commit(span, range(len(PREFIX)))
    segments = [Segment(other, [4, 5, 6], logits_from=2), Segment(span, TREE, PARENTS)]
    logits = target.forward(segments, store).logits_NV
    assert logits.shape == (1 + len(TREE), VOCAB)
    close(logits[0], plain(target, [4, 5, 6])[-1])
    for row, path in PATHS.items():
        close(logits[1 + row], plain(target, PREFIX + path)[-1])


def test_after_commit_as_a_fresh_pass(target: TransformersTarget) -> None:
    store = target.new_store(512)
    span = store.open()
    store.reserve(span, 64)
    target.forward([Segment(span, PREFIX)], store)
    store.commit(span, range(len(PREFIX)))
    target.forward([Segment(span, TREE, PARENTS)], store)
    store.commit(span, [0, 2, 4])
    tokens = PREFIX + PATHS[4]
    close(
        target.forward([Segment(span, [50, 51])], store).logits_NV[1],
        plain(target, [*tokens, 50, 51])[-1],
    )


def test_chunks_are_one_pass(target: TransformersTarget) -> None:
    store = target.new_store(512)
    span = store.open()
    rows = []
    for chunk in (PREFIX[:4], PREFIX[4:5], PREFIX[5:]):
        store.reserve(span, len(chunk))
        rows.append(target.forward([Segment(span, chunk)], store).logits_NV)
        store.commit(span, range(len(chunk)))
    close(torch.cat(rows), plain(target, PREFIX))


def test_taps(target: TransformersTarget) -> None:
    store = target.new_store(128)
    span = store.open()
    store.reserve(span, 16)
    taps = [0, 2, LAYERS]
    found = target.forward([Segment(span, PREFIX, logits_from=len(PREFIX))], store, taps)
    assert found.logits_NV.shape == (0, VOCAB)
    assert found.taps_RTD is not None
    with torch.no_grad():
        states = target.model(torch.tensor([PREFIX]), output_hidden_states=True).hidden_states
    for index, boundary in enumerate(taps[:-1]):
        close(found.taps_RTD[:, index], states[boundary][0])
    # transformers gives the last one behind the final norm only
    assert found.taps_RTD[:, -1].shape == (len(PREFIX), HIDDEN)
    block = target.blocks[-1]
    output: list[torch.Tensor] = []
    hook = block.register_forward_hook(lambda *args: output.append(args[2]))
    plain(target, PREFIX)
    hook.remove()
    last = output[0][0] if isinstance(output[0], tuple) else output[0]
    close(found.taps_RTD[:, -1], last.reshape(len(PREFIX), HIDDEN))


def test_taps_leave_no_hooks(target: TransformersTarget) -> None:
    store = target.new_store(128)
    span = store.open()
    store.reserve(span, 16)

    def hooks() -> list[int]:
        return [len(b._forward_hooks) + len(b._forward_pre_hooks) for b in target.blocks]

    before = hooks()
    target.forward([Segment(span, PREFIX)], store, [0, 1, LAYERS])
    assert hooks() == before


def test_leaving_layers_out_is_refused(target: TransformersTarget) -> None:
    store = target.new_store(64)
    span = store.open()
    store.reserve(span, 4)
    with pytest.raises(ConfigError, match="cannot leave layers out"):
        target.forward([Segment(span, [1])], store, layers=[0])


def test_lengths() -> None:
    """A window in every layer bounds the length; where layers differ, each gets its own mask."""

    def length(kind: str, settings: dict[str, Any]) -> int:
        return TransformersTarget(build(kind, settings), kind).info.max_length

    assert length("gpt2", OLD) == 128
    assert length("gemma2", NEW | WINDOW) == 128
    assert length("starcoder2", NEW | {"sliding_window": 32}) == 32
    assert length("starcoder2", NEW | {"sliding_window": None}) == 128


LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
MAMBA = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (MAMBA, "recurrent state"),
    "rwkv": (MAMBA | {"attention_hidden_size": HIDDEN}, "recurrent state"),
    "jamba": (
        NEW
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
        | {"use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "recurrent state",
    ),
    "recurrent_gemma": (
        NEW | {"lru_width": HIDDEN, "attention_window_size": 32, "head_dim": 8},
        "recurrent state",
    ),
    "falcon_h1": (
        NEW | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        "recurrent state",
    ),
    "lfm2": (NEW | {"layer_types": ["conv", "full_attention", "conv"]}, "recurrent state"),
    "bloom": ({"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ({"vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "gpt_neo": (
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]]},
        "masks by the order of keys",
    ),
    "deepseek_v3": (
        NEW
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "moe_intermediate_size": 16},
        "different shapes",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_the_reason(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(ModelError, match=reason) as caught:
        TransformersTarget(build(kind, settings), kind)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(kind)


def test_the_probe_sees_a_mask_that_is_not_followed() -> None:
    """A GPT-2 that sees everything before it, whatever the mask says, must not pass."""
    model = build("gpt2", OLD)
    TransformersTarget(model, "whole")
    block = model.transformer.h[1].attn
    forward = block.forward

    def blind(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            rows, keys = attention_mask.shape[-2:]
            later = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
            attention_mask = torch.zeros(1, 1, rows, keys).masked_fill(later, -1e9)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    block.forward = blind
    with pytest.raises(ModelError, match="does not follow an explicit mask"):
        TransformersTarget(model, "blind")


# Folders ----------------------------------------------------------------------------------------


def saved(folder: Path) -> Path:
    tiny.tiny_folder(folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    build("gpt_neox", RUN["gpt_neox"] | {"vocab_size": tiny.VOCAB}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_load(tmp_path: Path, dtype: str, expected: str) -> None:
    model = load(str(saved(tmp_path)), dtype, "cpu")
    assert isinstance(model.target, TransformersTarget)
    assert model.target.info.architecture == "gpt_neox"
    assert model.target.info.dtype == getattr(torch, expected)
    assert tiny.END in model.stop_ids


def test_a_model_that_brings_its_medusa_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path)
    capsys.readouterr()
    alone = load(str(folder), "fp32", "cpu").target
    path = folder / "model.safetensors"
    heads = {"medusa_head.0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}
    save_file(load_file(path) | heads, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 1}))
    assert capsys.readouterr().err == ""
    both = load(str(folder), "fp32", "cpu").target
    assert isinstance(both, TransformersTarget)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "trained together with the Medusa heads beside it: they cannot draft here" in said
    logits = []
    for target in (alone, both):
        store = target.new_store(64)
        span = store.open()
        store.reserve(span, len(PREFIX))
        logits.append(target.forward([Segment(span, PREFIX)], store).logits_NV)
    assert torch.equal(*logits)


def test_loading_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bars = logging.is_progress_bar_enabled()
    folder = saved(tmp_path)
    capfd.readouterr()
    load(str(folder), "fp32", "cpu")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() == bars


def test_missing_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    state = load_file(path)
    name = next(name for name in state if name.endswith("layers.1.mlp.dense_h_to_4h.weight"))
    del state[name]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(str(tmp_path), "fp32", "cpu")


def test_unexpected_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    state = load_file(path) | {"gpt_neox.layers.9.x.weight": torch.ones(2)}
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not use, such as 'gpt_neox\.layers\.9\.x"):
        load(str(tmp_path), "fp32", "cpu")


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut short or damaged .*; fetch it again"):
        load(str(tmp_path), "fp32", "cpu")


def test_logits_that_are_not_finite() -> None:
    model = build("gpt2", OLD)
    with torch.no_grad():
        model.transformer.h[2].mlp.c_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="are not finite; fetch"):
        TransformersTarget(model, "damaged")


@pytest.mark.parametrize("limit", [0, -5])
def test_no_room_for_any_prompt(limit: int) -> None:
    model = build("gpt_neox", RUN["gpt_neox"])
    model.config.max_position_embeddings = limit
    with pytest.raises(ModelError, match=f"allows {limit} positions"):
        TransformersTarget(model, "short")


def test_a_wrong_number_in_the_config_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "wide"}))
    with pytest.raises(ModelError, match="hidden_size") as caught:
        load(str(tmp_path), "fp32", "cpu")
    assert "\n" not in str(caught.value)


def test_unknown_to_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match="transformers cannot load") as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)
