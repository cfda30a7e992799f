"""The networks against a literal reference, number by number, with gradients and with every flag.

How a draft is trained and how it is run must agree: unrolled over a whole text with the mask
[causal | own row | own row ...], step s gives what cached drafting gives s tokens after a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_reference import Literal
from forerun.models.heads.attention import Joined
from forerun.models.heads.eagle import Eagle1, Eagle3, Eagle3Settings
from forerun.models.target import TargetInfo
from tiny_heads import tiny_eagle_module

ROWS, STEPS = 6, 3
INFO = TargetInfo(
    name="target",
    architecture="llama",
    vocab_size=50,
    hidden_size=32,
    layers=8,
    max_length=64,
    dtype=torch.float32,
    device=torch.device("cpu"),
    row_invariant=True,
    tree_invariant=True,
)
NOISE = torch.Generator().manual_seed(0)
TABLE = torch.randn(50, 32, generator=NOISE)
HEAD = torch.randn(50, 32, generator=NOISE)
TOKENS = torch.randint(50, (ROWS + STEPS,), generator=NOISE)
FEATURES = torch.randn(ROWS, 96, generator=NOISE)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle without bias": ("eagle", {"fc_bias": False}),
    "eagle of Qwen2": ("eagle", {"attention_bias": True, "o_bias": False}),
    "eagle3": ("eagle3", {}),
    "residual": ("eagle3", {"norm_before_residual": True}),
    "one norm": ("eagle3", {"norm_before_fc": True}),
    "norms": ("eagle3", {"fc_norm": True}),
    "output": ("eagle3", {"norm_output": True}),
    "qwen3": ("eagle3", {"qk_norm": True, "attention_bias": True, "mlp_bias": True}),
    "own embedding": ("eagle3", {"own_embedding": True, "rope_theta": 500_000.0}),
    "reduced": ("eagle3", {"draft_vocab_size": 20}),
    "target's head": ("eagle3", {"own_head": False}),
}


def embedded(module: Eagle1 | Eagle3, tokens: torch.Tensor) -> torch.Tensor:
    return module.embed_tokens(tokens) if module.embed_tokens else TABLE[tokens]


def logits(module: Eagle1 | Eagle3, hidden: torch.Tensor) -> torch.Tensor:
    states = module.readout(hidden)
    return module.lm_head(states) if module.lm_head else states @ HEAD.T


def unrolled(module: Eagle1 | Eagle3) -> list[torch.Tensor]:
    """Per step, the logits of all rows: training's way."""
    features = FEATURES if isinstance(module, Eagle3) else FEATURES[:, :32]
    hidden = module.fuse(features[None])
    memory = Joined()
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    found = []
    for step in range(STEPS):
        if step:
            mask = torch.cat([mask, torch.eye(ROWS, dtype=torch.bool)], 1)
        memory.mask_BRK = mask[None]
        tokens = TOKENS[step : step + ROWS]
        positions = torch.arange(step, step + ROWS)[None]
        hidden = module(hidden, embedded(module, tokens)[None], positions, memory)
        found.append(logits(module, hidden)[0])
    return found


def drafted(module: Eagle1 | Eagle3, row: int) -> list[torch.Tensor]:
    """The logits of one row and of the drafts behind it, literally."""
    network = Literal(module, lambda token: TABLE[token], lambda hidden: HEAD.double() @ hidden)
    features = FEATURES if isinstance(module, Eagle3) else FEATURES[:, :32]
    sees: list[int] = []
    hidden = torch.empty(0)
    found = []
    for step in range(row + STEPS):
        fed = network.fuse(features[step]) if step <= row else hidden
        hidden = network.row(fed, int(TOKENS[step]), step, sees)
        sees = [*sees, step]
        if step >= row:
            found.append(network.logits(hidden))
    return found


def close(found: list[torch.Tensor], row: int, literal: list[torch.Tensor]) -> bool:
    return all(
        torch.allclose(step[row].double(), wanted, atol=1e-4)
        for step, wanted in zip(found, literal, strict=True)
    )


@pytest.mark.parametrize("name", KINDS)
def test_training_and_drafting_equal_the_literal_reference(name: str) -> None:
    kind, numbers = KINDS[name]
    module = tiny_eagle_module(INFO, kind, **numbers)
    found = unrolled(module)
    for row in range(ROWS):
        assert close(found, row, drafted(module, row))


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_dropped_flag_is_seen(flag: str) -> None:
    module = tiny_eagle_module(INFO, **{flag: True})
    assert isinstance(module.settings, Eagle3Settings)
    without = Eagle3(module.settings.model_copy(update={flag: False}))
    without.load_state_dict(module.state_dict(), strict=False)
    assert not close(unrolled(without), 3, drafted(module, 3))


def test_more_layers_run_behind_the_first() -> None:
    """Two layers: the second is an ordinary one, with keys and values of its own."""
    for kind in ("eagle", "eagle3"):
        module = tiny_eagle_module(INFO, kind, layers=2)
        assert "layers.1.input_layernorm.weight" in module.state_dict()
        assert len(unrolled(module)) == STEPS


def test_gradients_reach_every_parameter_through_all_steps() -> None:
    for name in ("eagle", "eagle3", "norms"):
        kind, numbers = KINDS[name]
        module = tiny_eagle_module(INFO, kind, **numbers).requires_grad_(True)
        unrolled(module)[-1].square().mean().backward()
        for parameter_name, parameter in module.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


def test_tables_made_while_drafting_serve_training(tmp_path: Path) -> None:
    module = tiny_eagle_module(INFO)
    with torch.inference_mode():
        unrolled(module)
    module.requires_grad_(True)
    unrolled(module)[-1].sum().backward()
