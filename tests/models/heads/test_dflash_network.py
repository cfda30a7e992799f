from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_reference import block_hidden
from forerun.errors import ConfigError
from forerun.models.heads.dflash import DFlash, Injected, LayerAttention, default_taps
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
TAPS = (2, 3, 6)  # boundaries: the outputs of layers 1, 2 and 5
TOKENS, SLOTS = 9, 4


def module_of(**numbers: object) -> DFlash:
    return tiny_dflash_module(TARGET, taps=TAPS, layers=2, **numbers)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OUTPUTS = random(TARGET.layers, TOKENS, 32, seed=1)  # of each target layer, for TOKENS tokens
BLOCK = random(SLOTS, 32, seed=2)


def hidden(module: DFlash, outputs: Tensor = OUTPUTS, block: Tensor = BLOCK) -> Tensor:
    """The block's hidden states from our forward, all context given at once."""
    tokens, slots = outputs.shape[1], len(block)
    taps_KTE = outputs[[tap - 1 for tap in module.config.taps]].transpose(0, 1)
    positions_1K = torch.arange(tokens)[None]
    kv = module.context_kv(taps_KTE[None], positions_1K)
    positions_1Q = tokens + torch.arange(slots)[None]
    anchors_1Q = torch.full_like(positions_1Q, tokens)
    visible = module.visible(positions_1Q, anchors_1Q, positions_1K)
    return module(block[None], positions_1Q, Injected(kv, visible))[0]


def reference(module: DFlash, ids: tuple[int, ...] = (1, 2, 5), **rules: object) -> Tensor:
    config = {
        "target_layer_ids": ids,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "kv_heads": 2,
        "rope_theta": 10_000.0,
    }
    return block_hidden(module.state_dict(), config, list(OUTPUTS), BLOCK, **rules)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours.double(), theirs, atol=1e-5)


def test_a_block_is_what_the_paper_says() -> None:
    module = module_of()
    assert same(hidden(module), reference(module))


def test_a_shifted_tap_would_be_seen() -> None:
    module = module_of()
    for ids in ((0, 1, 4), (1, 2, 4), (2, 1, 5)):
        assert not same(hidden(module), reference(module, ids))


@pytest.mark.parametrize("name", ["hidden_norm", "layers.1.self_attn.q_norm", "norm"])
def test_a_dropped_norm_would_be_seen(name: str) -> None:
    module = module_of()
    theirs = reference(module)
    module.get_submodule(name).weight.fill_(1.0)
    assert not same(hidden(module), theirs)


def test_causal_layers() -> None:
    mixed = module_of(attention=(LayerAttention(causal=True), LayerAttention()))
    assert same(hidden(mixed), reference(mixed, causal=(True, False)))
    assert not same(hidden(mixed), reference(mixed))
    causal = module_of(attention=(LayerAttention(causal=True),) * 2)
    shorter = hidden(causal, block=BLOCK[:2])
    assert torch.allclose(shorter, hidden(causal)[:2], atol=1e-6)
    assert not torch.allclose(hidden(mixed, block=BLOCK[:2]), hidden(mixed)[:2], atol=1e-3)


def test_a_window_moves_along_with_the_slot() -> None:
    """Position p sees positions above p - window; the second layer sees everything."""
    module = module_of(attention=(LayerAttention(window=5), LayerAttention()))

    def first(layer: int, slot: int) -> int:
        return TOKENS + slot - 4 if layer == 0 else 0

    assert same(hidden(module), reference(module, context_first=first))
    assert not same(hidden(module), reference(module, context_first=lambda layer, slot: 0))


def test_a_window_may_be_measured_from_the_anchor() -> None:
    rules = (LayerAttention(window=5, causal=True), LayerAttention())
    module = module_of(attention=rules, window_from_anchor=True)

    def first(layer: int, slot: int) -> int:
        return TOKENS - 5 if layer == 0 else 0

    assert same(hidden(module), reference(module, context_first=first, causal=(True, False)))


def test_blocks_side_by_side_are_blocks_alone() -> None:
    """As training runs them: many anchors of one sequence, each sees only what came before it."""
    rules = (LayerAttention(window=6, causal=True), LayerAttention())
    module = module_of(attention=rules)
    anchors = torch.tensor([1, 3, TOKENS])
    blocks = random(3, SLOTS, 32, seed=3)
    positions_1K = torch.arange(TOKENS)[None]
    taps_KTE = OUTPUTS[[tap - 1 for tap in TAPS]].transpose(0, 1)
    kv = module.context_kv(taps_KTE[None], positions_1K)
    positions_1Q = (anchors[:, None] + torch.arange(SLOTS)).reshape(1, -1)
    anchors_1Q = anchors.repeat_interleave(SLOTS)[None]
    visible = module.visible(positions_1Q, anchors_1Q, positions_1K)
    together = module(blocks.reshape(1, -1, 32), positions_1Q, Injected(kv, visible))[0].unflatten(
        0, (3, -1)
    )
    for anchor, block, ours in zip(anchors.tolist(), blocks, together, strict=True):
        assert torch.allclose(ours, hidden(module, OUTPUTS[:, :anchor], block), atol=1e-5)


def test_what_a_block_may_see_in_training() -> None:
    """Eight tokens, anchors 2 and 5, three slots each: strictly before the anchor, own block."""
    module = module_of()
    positions = torch.tensor([[2, 3, 4, 5, 6, 7]])
    anchors = torch.tensor([[2, 2, 2, 5, 5, 5]])
    (mask, _) = module.visible(positions, anchors, torch.arange(8)[None])
    rows = ["".join("01"[int(seen)] for seen in row) for row in mask[0]]
    assert rows == ["11000000111000"] * 3 + ["11111000000111"] * 3


def test_gradients_reach_every_weight() -> None:
    module = module_of(own_embedding=True, draft_vocab_size=20, own_mask_embedding=True)
    module.requires_grad_(True)
    tokens = torch.tensor([3, 39, 39, 39])
    embedded = module.embed(tokens, lent=pytest.fail)
    logits = module.logits(hidden(module, block=embedded), lent=pytest.fail)
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3, 4])).backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def test_what_goes_in_and_out() -> None:
    module = module_of(
        embedding_scale=3.0, logit_scale=0.5, logit_softcap=2.0, own_mask_embedding=True
    )
    table, head = random(40, 32, seed=4), random(40, 32, seed=5)
    embedded = module.embed(torch.tensor([3, 39]), lambda tokens: table[tokens])
    assert torch.equal(embedded, torch.stack([table[3], module.mask_embedding]) * 3.0)
    logits = module.logits(BLOCK, lambda states: states @ head.T)
    assert torch.allclose(logits, 2.0 * torch.tanh(BLOCK @ head.T * 0.5 / 2.0))


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 3, (1, 17, 33)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (30, 1, (15,)),
    ],
)
def test_default_taps_are_those_of_published_drafts(
    layers: int, count: int, ids: tuple[int, ...]
) -> None:
    assert default_taps(layers, count) == tuple(id + 1 for id in ids)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"taps": (3, 2)}, r"taps \[3, 2\] must be ascending"),
        ({"taps": (2, 7)}, "tap 7 lies behind layer 6"),
        ({"attention": (LayerAttention(),)}, "1 attention rules for 2 layers"),
        ({"heads": 3}, "3 heads cannot share 2 key heads"),
        ({"mask_token": 40}, "mask token 40 is outside"),
        ({"draft_vocab_size": 41}, "draft vocabulary 41 is above 40"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_numbers_that_do_not_add_up(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_dflash_module(TARGET, **{"taps": TAPS, **numbers})
