from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.interop import dflash
from forerun.models.heads.dflash import DFlash, Injected, LayerAttention
from forerun.models.target import TargetInfo
from tiny_heads import tiny_dflash_module

TARGET = TargetInfo(
    name="tiny",
    architecture="llama",
    vocab_size=40,
    hidden_size=32,
    layers=6,
    max_length=64,
    dtype=torch.float32,
    device=torch.device("cpu"),
    row_invariant=True,
    tree_invariant=True,
)
SLIDING = (LayerAttention(window=8, causal=True), LayerAttention())
BIDIRECTIONAL = (LayerAttention(window=8), LayerAttention(window=8))


def module_of(**numbers: Any) -> DFlash:
    return tiny_dflash_module(TARGET, **numbers)


def written(tmp_path: Path, layout: str = "zlab", **numbers: Any) -> Path:
    dflash.export(module_of(**numbers), layout, tmp_path / "draft")
    return tmp_path / "draft"


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """The folder with another config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def retensored(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """The folder with other tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return folder


def logits(module: DFlash) -> Tensor:
    noise = torch.Generator().manual_seed(3)
    taps = torch.randn(1, 12, 3, 32, generator=noise)
    table, head = torch.randn(2, 40, 32, generator=noise)
    positions = torch.arange(12)[None]
    slots = 12 + torch.arange(4)[None]
    visible = module.visible(slots, torch.full_like(slots, 12), positions)
    block = module.embed(torch.tensor([5, 39, 39, 39]), lambda tokens: table[tokens])
    memory = Injected(module.context_kv(taps, positions), visible)
    states = module(block[None], slots, memory)[0]
    return module.logits(states, lambda states: states @ head.T)


ROUND_TRIPS: list[tuple[str, dict[str, Any]]] = [
    ("zlab", {}),
    ("zlab", {"attention": SLIDING}),
    ("zlab", {"attention": BIDIRECTIONAL}),
    ("zlab", {"attention": (LayerAttention(causal=True),) * 2}),
    ("zlab", {"embedding_scale": 5.5, "logit_scale": 0.7, "logit_softcap": 3.0}),
    ("specforge", {"rope_theta": 1e6, "norm_eps": 1e-6, "max_length": 128}),
    ("sglang", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("vllm", {"draft_vocab_size": 20}),
    ("vllm", {"draft_vocab_size": 40, "own_embedding": True}),
    ("vllm", {"own_mask_embedding": True, "attention_bias": True}),
    ("speculators", {}),
    ("speculators", {"anchor_first": True, "draft_vocab_size": 20, "own_embedding": True}),
    ("speculators", {"attention": SLIDING, "window_from_anchor": True}),
    ("speculators", {"attention": BIDIRECTIONAL, "window_from_anchor": True}),
]


@pytest.mark.parametrize(("layout", "numbers"), ROUND_TRIPS)
def test_what_is_written_is_read_back(tmp_path: Path, layout: str, numbers: dict[str, Any]) -> None:
    module = module_of(**numbers)
    command = dflash.export(module, layout, tmp_path / "draft", target="org/model")
    assert str(tmp_path / "draft") in command
    assert "org/model" in command
    assert dflash.detect(tmp_path / "draft")
    again = dflash.read(tmp_path / "draft")
    assert torch.equal(logits(again), logits(module))
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    known = module.config.model_copy(update={"rope_scaling": again.config.rope_scaling})
    changed = {
        name: (value, getattr(again.config, name))
        for name, value in known
        if value != getattr(again.config, name)
    }
    # speculators does not tell how deep the target is, and always measures windows from the anchor
    allowed = {"target_layers", "window_from_anchor"} if layout == "speculators" else set()
    if layout == "speculators" or numbers.get("draft_vocab_size") == 40:
        allowed |= {"draft_vocab_size"}
    assert changed.keys() <= allowed


def test_the_stored_type_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    module = module_of(own_mask_embedding=True, draft_vocab_size=20).to(torch.bfloat16)
    dflash.export(module, "vllm", tmp_path / "draft")
    for dtype, found in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        again = dflash.read(tmp_path / "draft", dtype)
        assert {parameter.dtype for parameter in again.parameters()} == {found}
        assert torch.equal(again.d2t, module.d2t)
    assert json.loads((tmp_path / "draft/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_zlab_folder_is_what_the_field_writes(tmp_path: Path) -> None:
    folder = written(tmp_path, taps=(2, 3, 6))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 5]
    assert config["dflash_config"]["mask_token_id"] == 39
    assert config["block_size"] == 5
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 3 + 2 * 11
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < tensors.keys()
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (16,)


def test_a_speculators_folder_names_the_inputs_of_layers(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", taps=(2, 3, 6), draft_vocab_size=20)
    config = json.loads((folder / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 6]
    assert config["sliding_window_non_causal"] is True
    methods = config["speculators_config"]["proposal_methods"]
    assert methods == [{"proposal_type": "greedy", "speculative_tokens": 4}]
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(20) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


@pytest.mark.parametrize(
    ("edit", "anchor_first"),
    [
        (lambda c: None, False),
        (lambda c: c["dflash_config"].update(sample_from_anchor=True), True),
        (lambda c: c["dflash_config"].pop("sample_from_anchor"), False),
        (lambda c: _flatten(c), True),
        (lambda c: (_flatten(c), c.update(sample_from_anchor=False)), False),
        (lambda c: (_flatten(c), c.update(dspark_bonus_anchor=True)), False),
        (lambda c: (_flatten(c), c.update(markov_rank=0)), True),
    ],
)
def test_which_slots_draft(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], anchor_first: bool
) -> None:
    config = dflash.read(edited(written(tmp_path), edit)).config
    assert config.anchor_first == anchor_first
    assert config.drafts == (5 if anchor_first else 4)


def _flatten(config: dict[str, Any]) -> None:
    """As DeepSpec writes it."""
    inner = config.pop("dflash_config")
    config.update(architectures=["Qwen3DSparkModel"], **inner)
    del config["sample_from_anchor"]


@pytest.mark.parametrize(
    ("edit", "taps"),
    [
        (lambda c: None, (1, 2, 6)),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), (1, 3, 5)),
        (lambda c: _flatten(c), (1, 2, 6)),
        (lambda c: c["dflash_config"].update(target_layer_ids=[-1, 0, 5]), (0, 1, 6)),
        (
            lambda c: (c["dflash_config"].pop("target_layer_ids"), c.update(num_target_layers=9)),
            (2, 7),
        ),
    ],
)
def test_which_layers_are_read(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], taps: tuple[int, ...]
) -> None:
    folder = edited(written(tmp_path), edit)
    if len(taps) == 2:  # as many as the draft has layers, where none are named
        retensored(folder, lambda t: t.update({"fc.weight": torch.ones(32, 64)}))
    assert dflash.read(folder).config.taps == taps


CAUSALITY = [
    ({}, [(8, True), (0, False)]),
    ({"is_causal": False}, [(8, False), (0, False)]),
    ({"is_causal": True}, [(8, True), (0, True)]),
    ({"causal": True}, [(8, True), (0, True)]),
    ({"causal_head": True}, [(8, True), (0, True)]),
    ({"is_causal": False, "causal": True}, [(8, False), (0, False)]),
    ({"swa_window_size": 4}, [(4, True), (0, False)]),
    ({"layer_types": None}, [(0, False), (0, False)]),
    ({"layer_types": None, "use_swa": True}, [(8, False), (8, False)]),
    ({"layer_types": ["full_attention"] * 2, "use_swa": True}, [(8, False), (8, False)]),
]


@pytest.mark.parametrize(("changes", "rules"), CAUSALITY)
def test_what_layers_see(
    tmp_path: Path, changes: dict[str, Any], rules: list[tuple[int, bool]]
) -> None:
    def edit(config: dict[str, Any]) -> None:
        for key, value in changes.items():
            outer = key in ("is_causal", "layer_types")
            (config if outer else config["dflash_config"])[key] = value

    config = dflash.read(edited(written(tmp_path, attention=SLIDING), edit)).config
    assert [(rule.window, rule.causal) for rule in config.attention] == rules


def test_names_met_in_the_wild(tmp_path: Path) -> None:
    folder = written(tmp_path, layers=1)
    before = logits(dflash.read(folder))

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors["model.midlayer." + name.removeprefix("layers.0.")] = tensors.pop(name)
        tensors["verifier_norm.weight"] = torch.ones(32)

    assert torch.equal(logits(dflash.read(retensored(folder, rename))), before)


def test_speculators_configs_leave_out_the_defaults_of_qwen3(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from forerun.interop.dflash_configs import QWEN3_DEFAULTS

    defaults = Qwen3Config().to_dict()
    assert {name: defaults[name] for name in QWEN3_DEFAULTS} == QWEN3_DEFAULTS
    folder = written(tmp_path, "speculators", norm_eps=1e-6)
    edited(folder, lambda c: c["transformer_layer_config"].pop("rms_norm_eps"))
    assert dflash.read(folder).config.norm_eps == 1e-6


def test_a_pickled_draft_is_read_without_running_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = logits(dflash.read(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(dflash.read(folder)), before)


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        ("zlab", lambda t: t.pop("fc.weight"), "has no tensor 'fc.weight'"),
        ("zlab", lambda t: t.update(extra=torch.ones(1)), "does not use: 'extra'"),
        ("zlab", lambda t: t.update({"fc.weight": torch.ones(32, 64)}), r"shape \[32, 64\]"),
        ("vllm", lambda t: t.pop("lm_head.weight"), "has no lm_head.weight for them"),
        ("vllm", lambda t: t.pop("d2t"), "has no tensor 'd2t'"),
        ("vllm", lambda t: t["d2t"].add_(torch.arange(20)), "must hold offsets"),
        ("vllm", lambda t: t["t2d"].fill_(True), "t2d and d2t name different tokens"),
        ("vllm", lambda t: t.update({"lm_head.weight": torch.ones(19, 32)}), "has 19 rows"),
        ("zlab", lambda t: t.update(d2t=torch.ones(40)), "maps a reduced vocabulary in d2t"),
    ],
)
def test_tensors_that_do_not_add_up(
    tmp_path: Path, layout: str, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    numbers = {"draft_vocab_size": 20} if layout == "vllm" else {}
    folder = retensored(written(tmp_path, layout, **numbers), edit)
    with pytest.raises(CheckpointError, match=message):
        dflash.read(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), "candidate selector"),
        (lambda c: (_flatten(c), c.update(markov_rank=256)), "a Markov head"),
        (lambda c: c["dflash_config"].update(projector_type="domino"), "projector_type"),
        (lambda c: c["dflash_config"].update(attention_sink_bias=True), "attention_sink_bias"),
        (lambda c: c["dflash_config"].update(shift_label=True), "shifted by one slot"),
        (lambda c: c.update(is_neox_style=False), "interleaved rotary"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 0, 5]), "must be ascending"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 2), "sliding_window None"),
    ],
)
def test_relatives_and_damaged_configs_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = edited(written(tmp_path), edit)
    assert dflash.detect(folder)
    with pytest.raises(ModelError, match=message):
        dflash.read(folder)


def test_other_folders_are_not_taken_for_drafts(tmp_path: Path) -> None:
    assert not dflash.detect(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not dflash.detect(tmp_path)


@pytest.mark.parametrize(
    ("layout", "numbers", "message"),
    [
        ("zlab", {"anchor_first": True}, "export it as speculators"),
        ("zlab", {"draft_vocab_size": 20}, "export it as vllm or speculators"),
        ("zlab", {"own_mask_embedding": True}, "export it as vllm"),
        (
            "zlab",
            {"attention": (LayerAttention(causal=True), LayerAttention())},
            "cannot say which",
        ),
        ("zlab", {"attention": SLIDING, "window_from_anchor": True}, "export it as speculators"),
        ("speculators", {"attention": SLIDING}, "export it as zlab"),
        ("speculators", {"attention": (LayerAttention(causal=True),) * 2}, "export it as zlab"),
        ("speculators", {"embedding_scale": 2.0}, "export it as zlab"),
        ("specforce", {}, "did you mean 'specforge'"),
    ],
)
def test_what_a_layout_cannot_say_is_not_written(
    tmp_path: Path, layout: str, numbers: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dflash.export(module_of(**numbers), layout, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_draft_is_described(tmp_path: Path) -> None:
    folder = written(tmp_path, attention=SLIDING)
    text = "\n".join(dflash.describe(folder, TARGET))
    assert "DFlash draft in z-lab layout: 2 layers of width 32" in text
    assert "outputs of layers 0, 1, 5 (from 0)" in text
    assert "blocks of 5 slots draft 4 tokens, in place; the mask token is 39" in text
    assert "1 causal, window 8; 1 bidirectional" in text
    assert "!" not in text


@pytest.mark.parametrize(
    ("layout", "edit", "doubt"),
    [
        ("zlab", lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "no rotary base"),
        (
            "speculators",
            lambda c: c.update(sliding_window_non_causal=False),
            "vLLM 0.32 would make every layer causal",
        ),
        ("speculators", lambda c: c.update(sample_from_anchor=True), "off by one"),
    ],
)
def test_what_looks_wrong_is_said(
    tmp_path: Path, layout: str, edit: Callable[[dict[str, Any]], object], doubt: str
) -> None:
    folder = written(tmp_path, layout)
    assert not [line for line in dflash.describe(folder) if line.startswith("!")]
    lines = dflash.describe(edited(folder, edit))
    assert [line for line in lines if line.startswith("! ") and doubt in line]


def test_weights_that_look_wrong_are_said(tmp_path: Path) -> None:
    folder = retensored(written(tmp_path), lambda t: t["fc.weight"].zero_())
    assert any("fc.weight is all zero" in line for line in dflash.describe(folder))
    retensored(folder, lambda t: t["fc.weight"].fill_(torch.nan))
    assert any("not finite" in line for line in dflash.describe(folder))


def test_a_target_that_does_not_fit_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for change, problem in (
        ({"hidden_size": 64}, "hidden states of size 32, tiny has 64"),
        ({"vocab_size": 41}, "made for 40 tokens, tiny has 41"),
        ({"layers": 5}, "reads behind layer 6, tiny has 5"),
    ):
        values = {name: getattr(TARGET, name) for name in TARGET.__slots__} | change
        lines = dflash.describe(folder, TargetInfo(**values))
        assert any(line.startswith("! ") and problem in line for line in lines)
