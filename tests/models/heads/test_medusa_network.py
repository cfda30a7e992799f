"""The heads against a literal reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import medusa_reference as reference
from forerun.interop import medusa
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from tiny import tiny_folder
from tiny_heads import tiny_medusa_module

STATES = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("medusa") / "model")


def logits(module: MedusaHeads, model: Path, heads: int | None = None) -> torch.Tensor:
    head_VC = load_file(model / "model.safetensors")["lm_head.weight"]
    return module(STATES, lambda states: functional.linear(states, head_VC), heads)


def expected(module: MedusaHeads, model: Path) -> torch.Tensor:
    head_VC = load_file(model / "model.safetensors")["lm_head.weight"]
    tensors = medusa.numbered(module)
    rows = [
        [
            reference.head_logits(state, tensors, k, module.config.layers, head_VC)
            for k in range(module.config.heads)
        ]
        for state in STATES
    ]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("output", ["each", "target"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_equals_the_formulas(model: Path, output: str, layers: int) -> None:
    module = tiny_medusa_module(model, layers=layers, output=output)
    wanted = expected(module, model)
    torch.testing.assert_close(logits(module, model), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(module, model, 2), wanted[:, :2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forgotten", ["bias", "residual", "own matrix"])
def test_what_is_forgotten_shows(model: Path, forgotten: str) -> None:
    """The control: logits move by far more than the tolerance."""
    module = tiny_medusa_module(model)
    wanted = expected(module, model)
    for name, parameter in module.named_parameters():
        if forgotten == "bias" and name.endswith("bias"):
            parameter.data.zero_()
        if forgotten == "residual" and name.endswith("layers.0.weight"):
            parameter.data -= torch.eye(32)
        if forgotten == "own matrix" and name == "lm_heads.1.weight":
            parameter.data = module.lm_heads[0].weight.data
    assert (logits(module, model) - wanted).abs().max() > 1e-2


def test_one_matrix_for_all_heads(model: Path) -> None:
    module = tiny_medusa_module(model, output="one")
    matrix = module.lm_heads[0].weight
    same = MedusaHeads(module.config.model_copy(update={"output": "target"}))
    same.load_state_dict({n: t for n, t in module.state_dict().items() if "lm_heads" not in n})
    wanted = same(STATES, lambda states: functional.linear(states, matrix))
    torch.testing.assert_close(logits(module, model), wanted)


def test_fresh_heads_say_what_the_target_says(model: Path) -> None:
    """Training starts from the target's own next token."""
    module = MedusaHeads(MedusaConfig(hidden_size=32, heads=2, output="target"))
    head_VC = load_file(model / "model.safetensors")["lm_head.weight"]
    own = functional.linear(STATES, head_VC)
    torch.testing.assert_close(logits(module, model), own[:, None].expand(-1, 2, -1))


def test_gradients_reach_every_parameter(model: Path) -> None:
    module = tiny_medusa_module(model, layers=2).requires_grad_(True)
    logits(module, model).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
