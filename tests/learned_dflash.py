"""DFlash drafts that know a tiny target's greedy texts by heart, and decoding with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import FREE
from forerun.core import SamplingParams, StepStats
from forerun.drafters import DraftContext, make_drafter
from forerun.engine.engine import Engine
from forerun.models.heads.dflash import DFlash, Injected
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment
from forerun.verify import make_verifier
from tiny_heads import tiny_dflash_module

PROMPTS = ["x", "the cat, the dog, the cat, the ", "hello world", "a b a b a b ", "forerun " * 12]
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


def decode(
    target: LoadedModel,
    spec: str,
    params: dict[str, Any],
    verifier: str = "follow",
    slots: int = 1024,
    max_tokens: int = 40,
) -> tuple[list[list[int]], StepStats]:
    store = target.target.new_store(slots)
    judge = make_verifier(verifier)
    context = DraftContext(
        target.target, store, target.tokenizer, pytest.fail, judge.independent_noise
    )
    engine = Engine(
        target.target,
        store=store,
        verifier=judge,
        drafter=make_drafter(spec, context),
        tokenizer=target.tokenizer,
        max_num_seqs=4,
        max_batch_rows=48,
        costs=FREE,
    )
    streams = []
    for seed, prompt in enumerate(PROMPTS):
        each = SamplingParams(seed=seed, max_tokens=max_tokens, **params)
        streams += engine.add(target.tokenizer.encode(prompt), each)
    while engine.busy:
        engine.step()
        store.check()
    return [stream.request.output for stream in streams], engine.stats


def taps_of(target: LoadedModel, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Of all tokens, from one plain pass, [rows, T, E]."""
    store = target.target.new_store(512)
    span = store.open()
    store.reserve(span, len(tokens))
    result = target.target.forward([Segment(span, tokens, logits_from=len(tokens))], store, taps)
    assert result.taps_RTD is not None
    return result.taps_RTD


@dataclass(frozen=True)
class Trained:
    """A draft that knows the greedy texts of the target by heart."""

    module: DFlash
    texts: list[list[int]]


def learn(target: LoadedModel, anchor_first: bool, rounds: int = 60, **numbers: Any) -> Trained:
    texts, _ = decode(target, "none", GREEDY, max_tokens=60)
    whole = [
        target.tokenizer.encode(prompt) + text for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    module = tiny_dflash_module(
        target.target.info, taps=(1, 3), anchor_first=anchor_first, block_size=4, **numbers
    )
    module.requires_grad_(True)
    batches = [_batch(target, module, tokens) for tokens in whole]
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(rounds):
        for batch in batches:
            optimiser.zero_grad()
            batch().backward()
            optimiser.step()
    return Trained(module.requires_grad_(False), whole)


def _batch(target: LoadedModel, module: DFlash, tokens: list[int]) -> Callable[[], Tensor]:
    """The loss of blocks at every place of a text, as the paper trains them."""
    config = module.config
    width, lend = config.block_size, target.target
    anchors_A = torch.arange(1, len(tokens) - width)
    context_1K = torch.arange(len(tokens))[None]
    taps_RTE = taps_of(target, tokens, config.taps)[None].clone()
    positions_AQ = anchors_A[:, None] + torch.arange(width)
    block_AQ = torch.full_like(positions_AQ, config.mask_token)
    block_AQ[:, 0] = torch.tensor(tokens)[anchors_A]
    embedded = module.embed(block_AQ.flatten(), lend.embed).detach().clone()  # type: ignore[attr-defined]
    visible = module.visible(
        positions_AQ.reshape(1, -1), anchors_A.repeat_interleave(width)[None], context_1K
    )
    head_VC = _head(target)
    shift = 1 - config.first_slot
    labels_AD = torch.tensor(tokens)[positions_AQ[:, config.first_slot :] + shift]

    def loss() -> Tensor:
        memory = Injected(module.context_kv(taps_RTE, context_1K), visible)
        hidden = module(embedded[None], positions_AQ.reshape(1, -1), memory)[0]
        drafted_ADC = hidden.unflatten(0, block_AQ.shape)[:, config.first_slot :]
        logits_NV = drafted_ADC.flatten(0, 1) @ head_VC.T
        return torch.nn.functional.cross_entropy(logits_NV, labels_AD.flatten())

    return loss


def _head(target: LoadedModel) -> Tensor:
    identity = torch.eye(target.target.info.hidden_size)
    return target.target.head_logits(identity).T.clone()  # type: ignore[attr-defined]
