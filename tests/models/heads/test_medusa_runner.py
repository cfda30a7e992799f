"""The fused heads against the module that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.models import kernels
from forerun.models.compiled import Compiled
from forerun.models.heads.medusa_runner import MedusaRunner
from forerun.models.hub import load
from forerun.models.target import OpenTarget
from tiny import tiny_folder, tiny_llama
from tiny_heads import tiny_medusa_module

KINDS: dict[str, dict[str, Any]] = {
    "each": {},
    "two layers": {"layers": 2},
    "no layer": {"layers": 0},
    "no bias": {"bias": False},
    "one": {"output": "one"},
    "target": {"output": "target"},
    "reduced": {"draft_vocab_size": 21},
}
STATES = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=["compiled", "plain"])
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OpenTarget:
    if request.param == "plain":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("no C compiler")
    target: OpenTarget = tiny_llama(tmp_path / "target").target  # type: ignore[assignment]
    assert isinstance(target.backend, Compiled) == (request.param == "compiled")
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_module(target: OpenTarget, tmp_path: Path, kind: str) -> None:
    module = tiny_medusa_module(tmp_path / "target", strength=2.0, **KINDS[kind])
    normed_NC = target.final_norm(STATES)
    runner = MedusaRunner(module, target, 3)
    for heads in (1, 3):
        expected = module(normed_NC, target.head_logits, heads)
        torch.testing.assert_close(runner.logits(STATES, heads), expected, atol=1e-5, rtol=1e-5)
    fewer = MedusaRunner(module, target, 2).logits(STATES, 2)
    torch.testing.assert_close(fewer, expected[:, :2], atol=1e-5, rtol=1e-5)


def test_heads_in_bfloat16_are_close(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "target")
    target: OpenTarget = load(str(folder), dtype="bfloat16", device="cpu").target  # type: ignore[assignment]
    module = tiny_medusa_module(tmp_path / "target")
    normed_NC = target.final_norm(STATES).float()
    expected = module(normed_NC, lambda states: target.head_logits(states).float())
    found = MedusaRunner(module, target, 3).logits(STATES.bfloat16(), 3)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
