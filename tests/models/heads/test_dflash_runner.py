"""The fused draft against the module that is trained: kinds of blocks, several requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models import kernels
from forerun.models.cache import Span
from forerun.models.compiled import Compiled
from forerun.models.heads.dflash import DFlash, Injected, LayerAttention
from forerun.models.heads.dflash_runner import DFlashRunner
from forerun.models.packing import Packed, pack
from forerun.models.target import OpenTarget, Segment
from tiny import tiny_llama
from tiny_heads import tiny_dflash_module

SLIDING = (LayerAttention(window=6, causal=True), LayerAttention(window=4))
KINDS: dict[str, dict[str, Any]] = {
    "in place": {},
    "anchor first": {"anchor_first": True},
    "causal": {"attention": (LayerAttention(causal=True), LayerAttention())},
    "sliding": {"attention": SLIDING},
    "sliding from the anchor": {"attention": SLIDING, "window_from_anchor": True},
    "own ends": {"draft_vocab_size": 100, "own_embedding": True, "own_mask_embedding": True},
    "scales": {"embedding_scale": 3.0, "logit_scale": 0.5, "logit_softcap": 2.0},
    "no norm of heads": {"qk_norm": False, "attention_bias": True},
}
LENGTHS = [9, 4]  # context tokens of two requests
ANCHORS = [17, 230]
TAPS = torch.randn(2, 9, 3, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=["compiled", "plain"])
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OpenTarget:
    if request.param == "plain":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("no C compiler")
    target: OpenTarget = tiny_llama(tmp_path / "target", layers=4).target  # type: ignore[assignment]
    assert isinstance(target.backend, Compiled) == (request.param == "compiled")
    return target


def expected(module: DFlash, target: OpenTarget, request: int) -> Tensor:
    """Logits of the drafting slots of a request, all of its context given at once."""
    c, length = module.config, LENGTHS[request]
    context_1K = torch.arange(length)[None]
    positions_1Q = length + torch.arange(c.block_size)[None]
    block = torch.tensor([ANCHORS[request], *[c.mask_token] * (c.block_size - 1)])
    memory = Injected(
        module.context_kv(TAPS[request, None, :length], context_1K),
        module.visible(positions_1Q, torch.full_like(positions_1Q, length), context_1K),
    )
    rows_QC = module.embed(block, lambda ids: target.embed(ids, scaled=False))
    hidden_QC = module(rows_QC[None], positions_1Q, memory)[0, c.first_slot :]
    return module.logits(hidden_QC, target.head_logits)


def append(runner: DFlashRunner, spans: Sequence[Span], ends: Sequence[int]) -> None:
    """Bring the context of each request up to where it ends, in one pass."""
    parts = [
        (span, TAPS[request, span.length : end])
        for request, (span, end) in enumerate(zip(spans, ends, strict=True))
        if end > span.length
    ]
    for span, taps_RTE in parts:
        runner.store.reserve(span, len(taps_RTE) + runner.config.block_size)
    packed = pack([Segment(span, range(len(taps_RTE))) for span, taps_RTE in parts])
    runner.append(packed, torch.cat([taps_RTE for _, taps_RTE in parts]))
    for span, taps_RTE in parts:
        runner.store.commit(span, range(len(taps_RTE)))


def blocks(runner: DFlashRunner, spans: Sequence[Span]) -> Packed:
    c = runner.config
    masks = [c.mask_token] * (c.block_size - 1)
    both = zip(spans, ANCHORS, strict=True)
    return pack([Segment(span, [anchor, *masks], None, c.first_slot) for span, anchor in both])


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_module(target: OpenTarget, kind: str) -> None:
    module = tiny_dflash_module(target.info, **KINDS[kind])
    wanted = torch.cat([expected(module, target, request) for request in range(2)])
    runner = DFlashRunner(module, target, slots=200)
    spans = [runner.store.open() for _ in LENGTHS]
    append(runner, spans, [5, 4])
    runner.logits(blocks(runner, spans))  # a round in between leaves nothing behind
    append(runner, spans, LENGTHS)
    found = runner.logits(blocks(runner, spans))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert torch.equal(runner.logits(blocks(runner, spans)), found)


def test_context_that_is_missing_shows(target: OpenTarget) -> None:
    """The control: the last context token moves the logits by far more than the tolerance."""
    module = tiny_dflash_module(target.info)
    runner = DFlashRunner(module, target, slots=200)
    spans = [runner.store.open() for _ in LENGTHS]
    append(runner, spans, [length - 1 for length in LENGTHS])
    found = runner.logits(blocks(runner, spans))
    wanted = torch.cat([expected(module, target, request) for request in range(2)])
    assert (found - wanted).abs().max() > 1e-2
