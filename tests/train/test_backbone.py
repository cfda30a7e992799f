"""The layers that are trained are those that are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from forerun.errors import ConfigError
from forerun.interop.model_folder import write_model
from forerun.models.hub import LoadedModel, load
from forerun.train.backbone import Backbone
from forerun.train.capture import Capture
from training import text

SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
TEXTS = [text((5, 12), length=12, seed=1), text((3, 17), length=17, seed=2)]


def model_of(folder: Path, kind: str, changes: dict[str, Any]) -> LoadedModel:
    tiny.tiny_folder(folder)  # for its tokenizer
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | changes)))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    theirs.save_pretrained(folder)
    return load(str(folder), "float32", "cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return model_of(tmp_path_factory.mktemp("model"), request.param, FAMILIES[request.param])


def made(model: LoadedModel, rank: int | None) -> Backbone:
    return Backbone(model.target, rank, torch.Generator().manual_seed(0))  # type: ignore[arg-type]


def changed(backbone: Backbone) -> Backbone:
    noise = torch.Generator().manual_seed(1)
    for parameter in backbone.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    return backbone


def served(model: LoadedModel) -> list[Tensor]:
    final_BRC = Capture(model.target, ())(TEXTS).final_BRC  # type: ignore[arg-type]
    return [final_BRC[b, : len(each.tokens)] for b, each in enumerate(TEXTS)]


def trained(backbone: Backbone) -> list[Tensor]:
    tokens_BR = Capture(backbone_target(backbone), ())(TEXTS).tokens_BR
    states_BRC = backbone(tokens_BR)
    return [states_BRC[b, : len(each.tokens)] for b, each in enumerate(TEXTS)]


def backbone_target(backbone: Backbone) -> Any:
    embed: Callable[..., Tensor] = backbone._embed
    return embed.__self__  # type: ignore[attr-defined]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rank", [None, 3])
def test_a_fresh_one_computes_what_the_target_computes(
    model: LoadedModel, rank: int | None
) -> None:
    backbone = made(model, rank)
    assert distance(trained(backbone), served(model)) < 1e-4
    assert distance(trained(changed(backbone)), served(model)) > 0.1, "blind to the weights"


@pytest.mark.parametrize("rank", [None, 3])
def test_what_is_written_computes_what_was_trained(
    model: LoadedModel, rank: int | None, tmp_path: Path
) -> None:
    backbone = changed(made(model, rank))
    tensors = backbone.published(backbone.state_dict())
    write_model(Path(model.name), tmp_path / "new", tensors, {})
    again = load(str(tmp_path / "new"), "float32", "cpu")
    assert distance(trained(backbone), served(again)) < 1e-4


def test_what_is_learned(tmp_path: Path) -> None:
    model = tiny.tiny_llama(tmp_path, layers=1)
    matrices = [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    low, whole = (
        {name for name, p in made(model, rank).named_parameters() if p.requires_grad}
        for rank in (3, None)
    )
    assert low == {f"layers.0.{m}.{part}" for m in matrices for part in ("down_KI", "up_OK")}
    norms = {f"layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert whole == {f"layers.0.{m}.weight" for m in matrices} | norms | {"norm.weight"}


def test_other_layers_are_refused(tmp_path: Path) -> None:
    changes = {"head_dim": 16, "sliding_window": 8}
    gemma = model_of(tmp_path, "gemma3_text", changes)
    with pytest.raises(ConfigError, match="not of gemma3_text; train medusa"):
        made(gemma, None)
