"""Our forward against the published ones, where an environment with them is at hand.

FORERUN_DFLASH_PYTHON=/envs/dflash/bin/python            pip install dflash[local]
FORERUN_SPECULATORS_PYTHON=/envs/speculators/bin/python  pip install speculators
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fakes import FREE
from forerun.core import SamplingParams
from forerun.drafters import DraftContext, make_drafter
from forerun.engine.engine import Engine
from forerun.interop import dflash
from forerun.models.heads.dflash import DFlash, Injected, LayerAttention
from forerun.models.target import TargetInfo
from forerun.verify import make_verifier
from learned_dflash import PROMPTS, learn
from tiny import VOCAB, tiny_folder, tiny_llama
from tiny_heads import tiny_dflash_module

DFLASH = os.environ.get("FORERUN_DFLASH_PYTHON")
SPECULATORS = os.environ.get("FORERUN_SPECULATORS_PYTHON")
needs_dflash = pytest.mark.skipif(not DFLASH, reason="set FORERUN_DFLASH_PYTHON")
needs_speculators = pytest.mark.skipif(not SPECULATORS, reason="set FORERUN_SPECULATORS_PYTHON")

TARGET = TargetInfo(
    name="tiny",
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=32,
    layers=6,
    max_length=64,
    dtype=torch.float32,
    device=torch.device("cpu"),
    row_invariant=True,
    tree_invariant=True,
)
SLIDING = (LayerAttention(window=8, causal=True), LayerAttention())


def run(python: str | None, script: str, *args: object) -> None:
    assert python
    command = [python, str(Path(__file__).parent / script), *(str(arg) for arg in args)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=offline)
    assert result.returncode == 0, result.stderr


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_hidden(module: DFlash, taps_KTE: Tensor, lengths: list[int], blocks: Tensor) -> Tensor:
    """Hidden states of blocks behind the first `lengths` tokens, [N, B, C]."""
    context_1K = torch.arange(len(taps_KTE))[None]
    kv = module.context_kv(taps_KTE[None], context_1K)
    found = []
    for length, block_BC in zip(lengths, blocks, strict=True):
        slots_1B = length + torch.arange(len(block_BC))[None]
        visible = module.visible(slots_1B, torch.full_like(slots_1B, length), context_1K)
        found.append(module(block_BC[None], slots_1B, Injected(kv, visible))[0])
    return torch.stack(found)


@needs_dflash
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"attention": SLIDING},
        {"attention": (LayerAttention(window=8),) * 2},
        {"attention": (LayerAttention(causal=True),) * 2, "rope_theta": 1e6, "norm_eps": 1e-6},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "heads": 2, "layers": 3},
    ],
)
def test_hidden_states_equal_those_of_the_dflash_package(
    tmp_path: Path, numbers: dict[str, Any]
) -> None:
    module = tiny_dflash_module(TARGET, **numbers)
    dflash.export(module, "zlab", tmp_path / "draft")
    taps, blocks, lengths = random(30, 3, 32, seed=1), random(5, 5, 32, seed=2), [9, 10, 13, 18, 30]
    given = {"taps": taps.flatten(1), "lengths": torch.tensor(lengths), "blocks": blocks}
    save_file(given, tmp_path / "inputs.safetensors")
    outputs = tmp_path / "outputs.safetensors"
    run(
        DFLASH,
        "published_dflash.py",
        "blocks",
        tmp_path / "draft",
        tmp_path / "inputs.safetensors",
        outputs,
    )
    theirs = load_file(outputs)["hidden"]
    assert torch.allclose(block_hidden(module, taps, lengths, blocks), theirs, atol=1e-5)
    # The control: one layer off.
    assert not torch.allclose(
        block_hidden(module, taps.roll(1, 1), lengths, blocks), theirs, atol=0.1
    )


@needs_dflash
def test_rounds_equal_those_of_the_dflash_package(tmp_path: Path) -> None:
    """Text and accepted tokens of every round, with a draft that is often right."""
    target = tiny_llama(tmp_path / "target", layers=4, seed=1)
    trained = learn(target, anchor_first=False, rounds=12)
    dflash.export(trained.module, "zlab", tmp_path / "draft")
    prompt = target.tokenizer.encode(PROMPTS[1])
    length = 50
    run(
        DFLASH, "published_dflash.py", "texts", tmp_path / "draft", tmp_path / "target",
        json.dumps(prompt), length, tmp_path / "out.json",
    )  # fmt: skip
    theirs = json.loads((tmp_path / "out.json").read_text())

    store = target.target.new_store(256)
    context = DraftContext(target.target, store, target.tokenizer, pytest.fail)
    engine = Engine(
        target.target,
        store=store,
        verifier=make_verifier("follow"),
        drafter=make_drafter(f"dflash:{tmp_path / 'draft'}", context),
        costs=FREE,
    )
    (stream,) = engine.add(prompt, SamplingParams(temperature=0, max_tokens=length))
    rounds = []
    while engine.busy:
        rounds += [len(delta.token_ids) for delta in engine.step()]
    assert prompt + stream.request.output == theirs["tokens"]
    # The first of ours is the prompt's. Theirs narrows the blocks that reach the end.
    whole = len(theirs["rounds"]) - 2
    assert rounds[1:][:whole] == theirs["rounds"][:whole]
    assert {1, 4} <= set(rounds), "rounds with nothing and with everything accepted"


@needs_speculators
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"draft_vocab_size": 20},
        {"attention": SLIDING, "window_from_anchor": True, "rope_theta": 1e6},
        {"attention": (LayerAttention(window=8),) * 2, "window_from_anchor": True, "layers": 2},
        {"anchor_first": True, "norm_eps": 1e-6},
    ],
)
def test_logits_equal_those_of_the_speculators_package(
    tmp_path: Path, numbers: dict[str, Any]
) -> None:
    module = tiny_dflash_module(TARGET, **numbers)
    verifier = tiny_folder(tmp_path / "target", layers=TARGET.layers)
    dflash.export(module, "speculators", tmp_path / "draft", target=str(verifier))
    taps, anchors = random(30, 3, 32, seed=1), [2, 9, 10, 24]
    tokens = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(3))
    given = {"taps": taps.flatten(1), "tokens": tokens, "anchors": torch.tensor(anchors)}
    save_file(given, tmp_path / "inputs.safetensors")
    outputs, saved = tmp_path / "outputs.safetensors", tmp_path / "saved"
    run(
        SPECULATORS, "speculators_dflash.py",
        tmp_path / "draft", tmp_path / "inputs.safetensors", outputs, saved,
    )  # fmt: skip
    theirs = load_file(outputs)["logits"]
    lent = load_file(verifier / "model.safetensors")
    embedding, head = lent["model.embed_tokens.weight"], lent["lm_head.weight"]
    assert torch.allclose(
        _logits(module, taps, tokens, anchors, embedding, head), theirs, atol=1e-4
    )
    shifted = _logits(module, taps.roll(1, 1), tokens, anchors, embedding, head)
    assert not torch.allclose(shifted, theirs, atol=0.1)
    again = dflash.read(saved)
    ours = _logits(again, taps, tokens, anchors, embedding, head)
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert again.config.anchor_first == module.config.anchor_first


def _logits(
    module: DFlash, taps: Tensor, tokens: Tensor, anchors: list[int], table: Tensor, head: Tensor
) -> Tensor:
    mask = module.config.mask_token
    blocks = torch.stack(
        [
            module.embed(torch.tensor([int(tokens[a]), *[mask] * 4]), lambda ids: table[ids])
            for a in anchors
        ]
    )
    hidden = block_hidden(module, taps, anchors, blocks)
    logits = module.logits(hidden.flatten(0, 1), lambda states: states @ head.T)
    return logits.unflatten(0, hidden.shape[:2])
