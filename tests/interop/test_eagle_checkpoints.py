from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError, ConfigError
from forerun.interop import eagle
from forerun.interop.eagle_configs import DEFAULTS
from forerun.models.heads.attention import Joined
from forerun.models.heads.eagle import Eagle1, Eagle3
from forerun.models.hub import LoadedModel
from tiny import tiny_llama
from tiny_heads import tiny_eagle_module

SPECULATORS_PYTHON = os.environ.get("FORERUN_SPECULATORS_PYTHON")
ALL_FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("model") / "target", layers=8, seed=1)


def make(target: LoadedModel, kind: str = "eagle3", **numbers: Any) -> Eagle1 | Eagle3:
    return tiny_eagle_module(target.target.info, kind, **numbers)


def same(one: Eagle1 | Eagle3, other: Eagle1 | Eagle3) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return (
        one.settings == other.settings
        and mine.keys() == theirs.keys()
        and all(torch.equal(mine[name], theirs[name]) for name in mine)
    )


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


ROUND_TRIPS: list[tuple[str, str, dict[str, Any]]] = [
    ("safeailab", "eagle", {}),
    ("vllm", "eagle", {"fc_bias": False, "own_embedding": True}),
    ("sglang", "eagle", {"attention_bias": True, "o_bias": False}),
    ("safeailab", "eagle3", {"taps": None, "draft_vocab_size": 64}),
    ("vllm", "eagle3", {**ALL_FLAGS, "rope_theta": 5e5, "own_head": False}),
    ("vllm", "eagle3", {"layers": 2}),
    ("sglang", "eagle3", {"taps": (2, 4, 5), "norm_before_fc": True}),
    ("sglang", "eagle3", {"taps": (3, 4, 8), "draft_vocab_size": 64}),
    ("specforge", "eagle3", {"target_hidden_size": 48, "own_embedding": True}),
    ("specforge", "eagle3", {"taps": (1, 3), "tap_count": 2, **ALL_FLAGS}),
    ("speculators", "eagle3", {"draft_vocab_size": 64, "qk_norm": True, "sliding_window": 9}),
    ("speculators", "eagle3", {**ALL_FLAGS, "layers": 2, "rope_theta": 5e5}),
    (
        "speculators",
        "eagle3",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
]


@pytest.mark.parametrize(("layout", "kind", "numbers"), ROUND_TRIPS)
def test_what_is_written_is_read_back(
    target: LoadedModel, tmp_path: Path, layout: str, kind: str, numbers: dict[str, Any]
) -> None:
    module = make(target, kind, **numbers)
    command = eagle.export(module, layout, tmp_path / "draft", "org/target")
    assert "org/target" in command
    assert str(tmp_path / "draft") in command
    assert eagle.detect(tmp_path / "draft")
    assert same(eagle.read(tmp_path / "draft"), module)
    assert not [doubt for doubt in eagle.describe(tmp_path / "draft") if "finite" in doubt]


def test_names_and_keys_are_those_that_others_look_for(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target, draft_vocab_size=64, taps=(2, 4, 5))
    eagle.export(module, "specforge", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        *("hidden_norm", "input_layernorm", "post_attention_layernorm"),
    }
    assert set(tensors) == {
        *(f"midlayer.{name}.weight" for name in layer),
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert int(tensors["t2d"].sum()) == 64
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert config[TAPS] == [2, 4, 5]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, TAPS: [1, 3, 4]}
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"} <= set(config)


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({}, None),
        ({TAPS: [1, 29, 57]}, (1, 29, 57)),
        ({TAPS: [2, 4, 5, 8]}, (2, 4, 5)),  # the last one only labels
        ({"eagle_config": {TAPS: [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {TAPS: [24, 30, 36]}}, (24, 30, 36)),
        ({TAPS: [2, 16, 29], "eagle_config": {TAPS: [1, 15, 28]}}, (2, 16, 29)),
    ],
)
def test_layer_ids_become_boundaries(
    target: LoadedModel, tmp_path: Path, keys: dict[str, Any], taps: tuple[int, ...] | None
) -> None:
    eagle.export(make(target, taps=None), "safeailab", tmp_path)
    edit(tmp_path, lambda config: config.update(keys))
    settings = eagle.read(tmp_path).settings
    assert settings.taps == taps  # type: ignore[union-attr]


def test_old_files_are_read_without_unpickling_code(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target, "eagle")
    eagle.export(module, "safeailab", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same(eagle.read(tmp_path), module)
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="take a safetensors version"):
        eagle.read(tmp_path)


def test_offsets_are_never_rounded(target: LoadedModel, tmp_path: Path) -> None:
    """bfloat16 knows no 257."""
    module = make(target, draft_vocab_size=2)
    module.d2t = torch.tensor([255, 257])
    eagle.export(module, "vllm", tmp_path)
    read = eagle.read(tmp_path, torch.bfloat16)
    assert read.d2t is not None
    assert read.d2t.tolist() == [255, 257]
    assert read.fc.weight.dtype == torch.bfloat16
    assert eagle.read(tmp_path, None).fc.weight.dtype == torch.float32


def test_raw_dumps_of_trainers_are_read(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target)
    eagle.export(module, "vllm", tmp_path)

    def dump(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"draft_model.{name}"] = tensors.pop(name)
        tensors["verifier_norm.weight"] = torch.ones(32)

    retensor(tmp_path, dump)
    assert same(eagle.read(tmp_path), module)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.pop(name)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("midlayer.self_attn.q_proj.weight"), "no tensor 'layers.0.self_attn.q_proj.weight'"),
        (drop("norm.weight"), "no tensor 'norm.weight'"),
        (drop("d2t"), "no tensor 'd2t'"),
        (put("surprise.weight", torch.ones(3)), "'surprise.weight'"),
        (put("norm.weight", torch.ones(31)), r"shape \[31\]"),
        (put("fc.weight", torch.ones(32, 100)), "no multiple of the target's width 32"),
        (put("d2t", torch.zeros(64, dtype=torch.int64)), "t2d and d2t name different"),
        (put("d2t", torch.arange(64).flip(0)), "offsets"),
        (put("t2d", torch.ones(259, dtype=torch.bool)), "t2d and d2t name different"),
    ],
)
def test_every_tensor_is_accounted_for(
    target: LoadedModel,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    eagle.export(make(target, draft_vocab_size=64), "vllm", tmp_path)
    retensor(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        eagle.read(tmp_path)


def test_a_flag_that_contradicts_the_tensors_is_refused(
    target: LoadedModel, tmp_path: Path
) -> None:
    eagle.export(make(target, fc_norm=True), "vllm", tmp_path)
    edit(tmp_path, put("fc_norm", False))
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        eagle.read(tmp_path)
    edit(tmp_path, drop("fc_norm"))
    assert eagle.read(tmp_path).settings.fc_norm  # type: ignore[union-attr]
    assert any("fc_norm is not stated" in line for line in eagle.describe(tmp_path))


def test_other_folders_are_not_taken_for_drafts(target: LoadedModel, tmp_path: Path) -> None:
    assert not eagle.detect(tmp_path)
    assert not eagle.detect(Path(target.name))
    with pytest.raises(CheckpointError, match="no EAGLE draft"):
        eagle.read(Path(target.name))


@pytest.mark.parametrize(
    ("layout", "kind", "numbers", "message"),
    [
        ("zlab", "eagle3", {}, "has no layout 'zlab'"),
        ("specforge", "eagle", {}, "knows no EAGLE-1"),
        ("speculators", "eagle", {}, "speculators knows EAGLE-3"),
        ("speculators", "eagle3", {"own_head": False}, "own output matrix"),
        ("safeailab", "eagle3", {"norm_output": True}, "neither norm flags"),
        ("safeailab", "eagle3", {}, "neither norm flags nor taps"),
        ("sglang", "eagle3", {"taps": (1, 2, 4)}, "boundary 1 first"),
        ("sglang", "eagle3", {"layers": 2}, "one layer"),
        ("vllm", "eagle3", {"qk_norm": True}, "take speculators"),
        ("vllm", "eagle3", {"sliding_window": 9}, "take speculators"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(
    target: LoadedModel,
    tmp_path: Path,
    layout: str,
    kind: str,
    numbers: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        eagle.export(make(target, kind, **numbers), layout, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_descriptions_say_what_is_there(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target, draft_vocab_size=64, norm_output=True, taps=(2, 4, 5), own_embedding=True)
    module.embed_tokens.weight *= torch.linspace(0.5, 2, 259)[:, None]  # type: ignore[union-attr]
    eagle.export(module, "speculators", tmp_path / "three", "org/model")
    said = eagle.describe(tmp_path / "three", target.target.info)
    assert said == [
        "an EAGLE-3.1 draft in speculators layout: one layer of width 32, an embedding of its "
        "own and a head of its own over 64 tokens",
        "for a target (org/model) of width 32 and 259 tokens",
        "it reads the target before layers 2, 4, 5",
        "norm flags on: norm_output",
        "rotary base 10000, unscaled; made for 512 positions",
    ]
    eagle.export(make(target, "eagle"), "vllm", tmp_path / "one")
    assert "EAGLE-1" in eagle.describe(tmp_path / "one", target.target.info)[0]


@pytest.mark.parametrize(
    ("layout", "change", "doubt"),
    [
        ("vllm", drop("rope_theta"), "names no rotary base"),
        ("vllm", put("rope_theta", 5e5), "ignores rope_theta"),
        ("vllm", put("norm_output", True), "SpecForge before August 2026"),
        ("vllm", put("tie_word_embeddings", True), "tie_word_embeddings"),
        ("speculators", drop("norm_before_residual"), "norm_before_residual is not stated"),
        ("speculators", lambda config: None, "whatever lies in memory"),
        (
            "vllm",
            lambda config: config.update({TAPS: None, "eagle_config": {TAPS: [1, 3, 6]}}),
            "before layers 2, 4, 7",
        ),
        ("vllm", put(TAPS, [1, 2, 9]), "do not ascend within the 8 layers"),
    ],
)
def test_descriptions_say_what_looks_wrong(
    target: LoadedModel,
    tmp_path: Path,
    layout: str,
    change: Callable[[dict[str, Any]], None],
    doubt: str,
) -> None:
    eagle.export(make(target), layout, tmp_path)
    edit(tmp_path, change)
    said = eagle.describe(tmp_path, target.target.info)
    assert len([line for line in said if line.startswith(("! ", "? ")) and doubt in line]) == 1


def test_a_sound_draft_raises_no_doubts(target: LoadedModel, tmp_path: Path) -> None:
    """The control of the test above."""
    eagle.export(make(target), "vllm", tmp_path)
    assert not [line for line in eagle.describe(tmp_path) if line.startswith(("! ", "? "))]


def test_speculators_drafts_get_the_targets_embedding(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target)
    eagle.export(module, "speculators", tmp_path, target.name)
    read = eagle.read(tmp_path)
    assert read.embed_tokens is not None
    assert torch.equal(read.embed_tokens.weight, target.target.embed(torch.arange(259)))


def test_a_random_embedding_is_noticed(target: LoadedModel, tmp_path: Path) -> None:
    module = make(target, own_embedding=True)
    assert module.embed_tokens is not None
    eagle.export(module, "vllm", tmp_path / "random")
    assert any("looks random" in line for line in eagle.describe(tmp_path / "random"))
    module.embed_tokens.weight *= torch.linspace(0.5, 2, 259)[:, None]
    eagle.export(module, "vllm", tmp_path / "trained")
    assert not any("looks random" in line for line in eagle.describe(tmp_path / "trained"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, Qwen3Config

    for kind, theirs in (("llama", LlamaConfig()), ("qwen3", Qwen3Config())):
        assert {key: getattr(theirs, key) for key in DEFAULTS[kind]} == DEFAULTS[kind]


# ---- the speculators package --------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"norm_before_residual": True, "rope_theta": 5e5},
    "one_norm": {"norm_before_fc": True, "draft_vocab_size": 64},
    "all_norms": {**ALL_FLAGS, "own_embedding": True},
    "qwen3": {"qk_norm": True, "attention_bias": True, "layers": 2, "norm_output": True},
    "window": {"qk_norm": True, "sliding_window": 4},
}
STEPS, ROWS = 3, 12


@pytest.fixture(scope="module")
def theirs(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases as the package computes and saves them."""
    root = tmp_path_factory.mktemp("speculators")
    noise = torch.Generator().manual_seed(0)
    for name, numbers in CASES.items():
        module = make(target, **numbers)
        eagle.export(module, "speculators", root / name / "draft", target.name)
        features = torch.randn(ROWS, 96, generator=noise)
        tokens = torch.randint(259, (ROWS,), generator=noise)
        save_file({"features": features, "tokens": tokens}, root / name / "inputs.safetensors")
    script = Path(__file__).with_name("speculators_eagle3.py")
    folders = [str(root / name) for name in CASES]
    assert SPECULATORS_PYTHON
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([SPECULATORS_PYTHON, str(script), *folders], check=True, env=environment)
    return root


def steps(module: Eagle1 | Eagle3, target: LoadedModel, folder: Path) -> list[torch.Tensor]:
    """Our logits, step by step, as in training; positions start at 0, theirs at 1."""
    given = load_file(folder / "inputs.safetensors")
    hidden = module.fuse(given["features"][None])
    memory = Joined()
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    if window := module.settings.sliding_window:
        mask = mask.triu(1 - window)
    found = []
    for step in range(STEPS):
        if step:
            mask = torch.cat([mask, torch.eye(ROWS, dtype=torch.bool)], 1)
        memory.mask_BRK = mask[None]
        tokens = torch.cat([given["tokens"][step:], torch.zeros(step, dtype=torch.int64)])
        own = module.embed_tokens
        embedded = own(tokens) if own else target.target.embed(tokens)
        positions = torch.arange(step, step + ROWS)[None]
        hidden = module(hidden, embedded[None], positions, memory)
        assert module.lm_head
        found.append(module.lm_head(module.readout(hidden))[0])
    return found


@pytest.mark.skipif(
    not SPECULATORS_PYTHON,
    reason="FORERUN_SPECULATORS_PYTHON names no Python with the speculators package",
)
@pytest.mark.parametrize("name", CASES)
def test_the_speculators_package_computes_the_same(
    target: LoadedModel, theirs: Path, name: str
) -> None:
    folder = theirs / name
    expected_SRU = load_file(folder / "outputs.safetensors")["logits"]
    module = eagle.read(folder / "draft")
    found = steps(module, target, folder)
    for step, (ours, wanted) in enumerate(zip(found, expected_SRU, strict=True)):
        assert torch.allclose(ours[: ROWS - step], wanted[: ROWS - step], atol=1e-5)
    saved = eagle.read(folder / "saved")
    again = steps(saved, target, folder)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(again, found, strict=True))
    for flag in ("norm_before_residual", "norm_output"):
        other = type(module)(
            module.settings.model_copy(update={flag: not getattr(module.settings, flag)})
        )
        other.load_state_dict(module.state_dict())
        assert not torch.allclose(steps(other, target, folder)[1], found[1], atol=1e-3), flag
