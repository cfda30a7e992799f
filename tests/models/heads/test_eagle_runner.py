"""The fused draft against the module that is trained: chains, trees, windows, several requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.drafters.tree import ancestor_mask, depths
from forerun.models import kernels
from forerun.models.compiled import Compiled
from forerun.models.heads.attention import Joined
from forerun.models.heads.eagle import Eagle1, Eagle3
from forerun.models.heads.eagle_runner import EagleRunner
from forerun.models.packing import Packed, Part, pack_parts
from forerun.models.plain import Plain
from forerun.models.target import TargetInfo
from tiny_heads import tiny_eagle_module

VOCAB, HIDDEN = 50, 32
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle without bias": ("eagle", {"fc_bias": False, "layers": 2}),
    "eagle3": ("eagle3", {}),
    "two layers": ("eagle3", {"layers": 2}),
    "residual": ("eagle3", {"norm_before_residual": True}),
    "one norm": ("eagle3", {"norm_before_fc": True}),
    "norms": ("eagle3", {"fc_norm": True}),
    "output": ("eagle3", {"norm_output": True}),
    "qwen3": ("eagle3", {"qk_norm": True, "attention_bias": True, "mlp_bias": True}),
    "own embedding": ("eagle3", {"own_embedding": True, "rope_theta": 500_000.0}),
    "reduced": ("eagle3", {"draft_vocab_size": 20}),
    "target's head": ("eagle3", {"own_head": False}),
    "window": ("eagle3", {"sliding_window": 4}),
}
TREE = [-1, -1, 0, 0, 1, 2, 4, 4]
LEVELS = [2, 5, 8]
NOISE = torch.Generator().manual_seed(0)
LENGTHS = [9, 4]  # stable rows of two requests
TOKENS = torch.randint(VOCAB, (2, 9 + len(TREE)), generator=NOISE)
FEATURES = torch.randn(2, 9, 3 * HIDDEN, generator=NOISE)


class Ends:
    """A target of which only the two ends are there; its final norm changes nothing."""

    backend = None

    def __init__(self, dtype: torch.dtype) -> None:
        noise = torch.Generator().manual_seed(1)
        self.embedding_VC = torch.randn(VOCAB, HIDDEN, generator=noise).to(dtype)
        self.head = (torch.randn(VOCAB, HIDDEN, generator=noise) * HIDDEN**-0.5).to(dtype)
        self.info = TargetInfo(
            name="target",
            architecture="llama",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            layers=8,
            max_length=64,
            dtype=dtype,
            device=torch.device("cpu"),
            row_invariant=True,
            tree_invariant=True,
        )

    def embed(self, tokens_N: Tensor, scaled: bool = True) -> Tensor:
        assert not scaled
        return self.embedding_VC[tokens_N]

    def final_norm(self, hidden_NC: Tensor) -> Tensor:
        return hidden_NC.clone()

    def head_logits(self, states_NC: Tensor) -> Tensor:
        return (states_NC @ self.head.T).float()


def module_of(name: str, target: Ends) -> Eagle1 | Eagle3:
    kind, numbers = KINDS[name]
    return tiny_eagle_module(target.info, kind, seed=2, **numbers).to(target.info.dtype)


def features_of(module: Eagle1 | Eagle3, request: int) -> Tensor:
    width = 3 * HIDDEN if isinstance(module, Eagle3) else HIDDEN
    features_RF = FEATURES[request, : LENGTHS[request], :width]
    return features_RF.to(module.fc.weight.dtype).contiguous()


def reference(module: Eagle1 | Eagle3, target: Ends, request: int) -> Tensor:
    """Logits of the stable rows and of the nodes of the tree, with all of both in two passes."""
    length = LENGTHS[request]
    memory = Joined()

    def visible(levels: Sequence[int], mask_RK: Tensor, positions_K: Sequence[int]) -> Tensor:
        window = module.settings.sliding_window or 99
        distance = torch.tensor(levels)[:, None] - torch.tensor(positions_K)
        return (mask_RK & (distance < window))[None]

    def run(hidden_RC: Tensor, tokens_R: Tensor, positions: Sequence[int]) -> Tensor:
        own = module.embed_tokens
        embedded_RC = own(tokens_R) if own else target.embedding_VC[tokens_R]
        at = torch.tensor([positions])
        out_RC: Tensor = module(hidden_RC[None], embedded_RC[None], at, memory)[0]
        return out_RC

    stable = list(range(length))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    memory.mask_BRK = visible(stable, causal, stable)
    fused_RC = module.fuse(features_of(module, request)[None])[0]
    found = [run(fused_RC, TOKENS[request, :length], stable)]
    levels = [length + depth for depth in depths(TREE)]
    begin, fed = 0, found[0][-1:].expand(2, -1)
    for end in LEVELS:
        rows = range(begin, end)
        mask = torch.cat(
            (torch.ones(len(rows), length, dtype=torch.bool), ancestor_mask(TREE)[begin:end, :end]),
            1,
        )
        memory.mask_BRK = visible(levels[begin:end], mask, [*stable, *levels[:end]])
        found.append(run(fed, TOKENS[request, length + begin : length + end], levels[begin:end]))
        nodes = torch.cat(found[1:])
        begin = end
        if end < len(TREE):
            following = LEVELS[LEVELS.index(end) + 1]
            fed = nodes[TREE[end:following]]
    states = module.readout(torch.cat(found))
    return module.lm_head(states).float() if module.lm_head else target.head_logits(states)


def drafted(runner: EagleRunner, module: Eagle1 | Eagle3) -> list[Tensor]:
    """The same from the runner, both requests side by side."""
    spans = [runner.store.open() for _ in LENGTHS]
    for span in spans:
        runner.store.reserve(span, 30)
    features = torch.cat([features_of(module, request) for request in range(2)])
    parts = [
        Part(span, range(-1, length - 1), length)
        for span, length in zip(spans, LENGTHS, strict=True)
    ]
    tokens = [token for i in range(2) for token in TOKENS[i, : LENGTHS[i]].tolist()]
    hidden = runner.run(pack_parts(tokens, parts), runner.fuse(features))
    found = [[part] for part in hidden.clone().split(LENGTHS)]
    for span, length in zip(spans, LENGTHS, strict=True):
        runner.store.commit(span, range(length))
    begin = 0
    for end in LEVELS:
        fed = []
        for rows in found:
            nodes = torch.cat(rows[1:]) if begin else rows[0][-1:]
            fed.append(nodes[[max(parent, 0) for parent in TREE[begin:end]]])
        parts = [Part(span, TREE[:end], end - begin) for span in spans]
        ids = (TOKENS[i, length + begin : length + end] for i, length in enumerate(LENGTHS))
        tokens = torch.cat(list(ids)).tolist()
        hidden = runner.run(pack_parts(tokens, parts), torch.cat(fed))
        for rows, part in zip(found, hidden.clone().chunk(2), strict=True):
            rows.append(part)
        begin = end
    return [runner.logits(torch.cat(rows)) for rows in found]


def run_both(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    target = Ends(dtype)
    module = module_of(name, target)
    runner = EagleRunner(module, target, 100)  # type: ignore[arg-type]
    assert isinstance(runner._backend, Plain if kernels.library() is None else Compiled)
    return drafted(runner, module), [reference(module, target, request) for request in range(2)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_it_computes_what_the_module_says(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and kernels.library() is None:
        pytest.skip("no C compiler")
    if not compiled:
        monkeypatch.setattr(kernels, "library", lambda: None)
    for found, expected in zip(*run_both(name, torch.float32), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
@pytest.mark.parametrize("name", KINDS)
def test_in_bfloat16_it_is_as_near_as_the_module(name: str) -> None:
    exact = run_both(name, torch.float32)[1]
    found, module = run_both(name, torch.bfloat16)
    for ours, theirs, truth in zip(found, module, exact, strict=True):
        assert (ours - truth).abs().mean() < 1.5 * (theirs - truth).abs().mean()


def test_another_flag_is_another_network() -> None:
    """The control of the tests above."""
    flags = ("eagle3", "residual", "one norm", "norms", "output", "window", "own embedding")
    results = {name: run_both(name, torch.float32)[0][0] for name in flags}
    for one in flags:
        for other in flags:
            assert one == other or not torch.allclose(results[one], results[other], atol=1e-3)


def test_a_packed_part_holds_its_rows_last() -> None:
    target = Ends(torch.float32)
    runner = EagleRunner(module_of("eagle3", target), target, 100)  # type: ignore[arg-type]
    span = runner.store.open()
    runner.store.reserve(span, 8)
    packed = pack_parts([7, 8], [Part(span, [-1, 0, 0], 2)])
    assert packed == Packed(
        [7, 8], *(array("i", x) for x in ([0], [0], [0, 2], [0, 3], [-1, 0, 0])), []
    )
