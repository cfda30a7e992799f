"""The compiled layers against plain PyTorch, and bit for bit against themselves."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.compiled import Compiled
from forerun.models.decoder import Decoder
from forerun.models.plain import Plain
from forerun.models.target import Segment

LLAMA = DecoderConfig(
    architecture="llama",
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=32,
    max_length=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
GEMMA = replace(
    LLAMA,
    architecture="gemma3_text",
    head_dim=80,
    kv_heads=1,
    sliding_window=20,
    sliding_layers=(True, False),
    rope_local_theta=5000.0,
    qk_norm=True,
    sandwich_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    embedding_scale=48**0.5,
    attention_softcap=20.0,
    logit_softcap=25.0,
    tied_embeddings=True,
)
QWEN = replace(LLAMA, architecture="qwen2", qkv_bias=True, heads=5, kv_heads=5, head_dim=16)
WIDE = replace(LLAMA, heads=2, kv_heads=1, head_dim=256, o_bias=True, mlp_bias=True)
CONFIGS = {"llama": LLAMA, "gemma": GEMMA, "qwen": QWEN, "wide": WIDE}
BRANCHES = [-1, 0, 1, 0, 3, -1, 5, 6, 5, 2]  # of a tree of ten nodes

needs_compiler = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


class RandomWeights:
    """Stands in for a checkpoint: any tensor, always the same for the same name."""

    def __init__(self, tied: bool) -> None:
        self.tied = tied

    def __contains__(self, name: str) -> bool:
        return not (self.tied and name == "lm_head.weight")

    def take(self, name: str, *shape: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(sum(name.encode()))
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        centre = 1.0 if "norm" in name else 0.0
        return centre + scale * torch.randn(shape, generator=noise)

    def finish(self) -> None:
        """All names exist."""


def build(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    return Decoder(config, RandomWeights(config.tied_embeddings), dtype, torch.device("cpu"), "t")


def plain(monkeypatch: pytest.MonkeyPatch, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        decoder = build(config, dtype)
    assert isinstance(decoder.backend, Plain)
    return decoder


def compiled(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    decoder = build(config, dtype)
    assert isinstance(decoder.backend, Compiled)
    return decoder


def tokens(count: int, start: int = 0) -> list[int]:
    return [(17 * i + start) % 101 for i in range(count)]


def passes(decoder: Decoder) -> torch.Tensor:
    """A prompt, then a chain, a tree and a fresh prompt of different lengths in one pass."""
    store = decoder.new_store(400)
    long, short, fresh = store.open(), store.open(), store.open()
    for span, rows in ((long, 140), (short, 40), (fresh, 80)):
        store.reserve(span, rows)
    first = decoder.forward([Segment(long, tokens(90)), Segment(short, tokens(3))], store)
    store.commit(long, range(90))
    store.commit(short, range(3))
    second = decoder.forward(
        [
            Segment(long, tokens(10, 5), BRANCHES),
            Segment(short, tokens(7, 9)),
            Segment(fresh, tokens(70, 2), None, 60),
        ],
        store,
        taps=(0, 1, 2),
    )
    assert second.taps_RTD is not None
    return torch.cat([first.logits_NV, second.logits_NV]), second.taps_RTD.float()


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_plain_torch_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, taps = passes(compiled(CONFIGS[name], torch.float32))
    expected, expected_taps = passes(plain(monkeypatch, CONFIGS[name], torch.float32))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(taps, expected_taps, atol=1e-4, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_near_plain_torch_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _ = passes(compiled(CONFIGS[name], torch.bfloat16))
    exact, _ = passes(plain(monkeypatch, CONFIGS[name], torch.float32))
    other, _ = passes(plain(monkeypatch, CONFIGS[name], torch.bfloat16))
    assert (logits - exact).abs().mean() < 1.5 * (other - exact).abs().mean()


def chain(decoder: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position, fed in chunks."""
    store = decoder.new_store(300)
    span = store.open()
    rows = []
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        store.reserve(span, len(part))
        rows.append(decoder.forward([Segment(span, part)], store).logits_NV)
        store.commit(span, range(len(part)))
    return torch.cat(rows)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    decoder = compiled(CONFIGS[name], dtype)
    assert decoder.info.row_invariant
    assert decoder.row_multiple == 1
    single = chain(decoder, tokens(150), 1)
    for chunk in (2, 3, 7, 8, 64, 150):
        assert torch.equal(chain(decoder, tokens(150), chunk), single), chunk


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", [1, 5, 60, 64, 130])
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_give_the_bits_of_their_paths(name: str, dtype: torch.dtype, prefix: int) -> None:
    decoder = compiled(CONFIGS[name], dtype)
    assert decoder.info.tree_invariant
    store = decoder.new_store(300)
    other, span = store.open(), store.open()
    store.reserve(other, 30)
    store.reserve(span, prefix + 10)
    decoder.forward([Segment(span, tokens(prefix))], store)
    store.commit(span, range(prefix))
    nodes = tokens(10, 3)
    tree = decoder.forward(
        [Segment(other, tokens(30, 4)), Segment(span, nodes, BRANCHES)], store
    ).logits_NV[30:]
    for node in range(10):
        path = [node]
        while BRANCHES[path[0]] >= 0:
            path.insert(0, BRANCHES[path[0]])
        alone = chain(decoder, tokens(prefix) + [nodes[i] for i in path], 1)
        assert torch.equal(tree[node], alone[-1]), node


@needs_compiler
def test_a_row_sees_its_own_path_only() -> None:
    """Negative control: another parent is another row, another sibling is not."""
    decoder = compiled(LLAMA, torch.float32)

    def last_row(sibling: int, parent: int) -> torch.Tensor:
        store = decoder.new_store(100)
        span = store.open()
        store.reserve(span, 20)
        segment = Segment(span, [1, 2, sibling, 3], [-1, 0, 0, parent], 3)
        return decoder.forward([segment], store).logits_NV

    assert torch.equal(last_row(sibling=5, parent=1), last_row(sibling=9, parent=1))
    assert not torch.equal(last_row(sibling=5, parent=1), last_row(sibling=5, parent=2))
    assert not torch.equal(last_row(sibling=5, parent=2), last_row(sibling=9, parent=2))


@needs_compiler
def test_layers_left_out_are_those_of_a_smaller_model() -> None:
    decoder = compiled(LLAMA, torch.float32)
    for layers in itertools.chain(([0],), ([1],)):
        store = decoder.new_store(100)
        span = store.open()
        store.reserve(span, 9)
        part = decoder.forward([Segment(span, tokens(9))], store, layers=layers).logits_NV
        whole, decoder.layers = decoder.layers, [decoder.layers[i] for i in layers]
        smaller = replace(LLAMA, layers=1)
        decoder.config, kept = smaller, decoder.config
        again = decoder.forward([Segment(span, tokens(9))], store).logits_NV
        decoder.layers, decoder.config = whole, kept
        assert torch.equal(part, again)


def test_without_a_compiler_plain_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "0")
    kernels.library.cache_clear()
    try:
        assert isinstance(build(LLAMA, torch.float32).backend, Plain)
    finally:
        monkeypatch.undo()
        kernels.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("with_plain", [False, True])
def test_a_dropped_store_is_freed(monkeypatch: pytest.MonkeyPatch, with_plain: bool) -> None:
    """And a fresh one, though it may lie at the same place, is told from it."""
    float32 = torch.float32
    decoder = plain(monkeypatch, LLAMA, float32) if with_plain else compiled(LLAMA, float32)
    first = passes(decoder)
    store = decoder.new_store(64)
    span = store.open()
    store.reserve(span, 8)
    decoder.forward([Segment(span, tokens(8))], store)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(passes(decoder), first, rtol=0, atol=0)
