"""What draft networks ask of the layers: passes over passes, two inputs, rows that see ahead.

Compiled and plain layers are held to each other, and to what they must mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.models import kernels
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled
from forerun.models.layers import Backend, Layer, make_backend
from forerun.models.packing import Packed
from forerun.models.plain import Plain
from forerun.models.rope import Rope

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 48, 3, 1, 32, 80
CONFIG = DecoderConfig(
    architecture="draft",
    vocab_size=101,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    layers=2,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    max_length=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
CPU = torch.device("cpu")
TREE = [-1, -1, 0, 0, 1, 2, 4, 4]  # of three levels: 2, 3 and 3 nodes
LEVELS = [2, 5, 8]
needs_compiler = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(backend: str, dtype: torch.dtype = torch.float32) -> Backend:
    made: Backend = Plain(CONFIG) if backend == "plain" else make_backend(CONFIG, dtype, CPU)
    assert isinstance(made, Plain if backend == "plain" else Compiled)
    return made


def layer(
    backend: Backend, index: int, dtype: torch.dtype = torch.float32, **flags: object
) -> Layer:
    """flags: of `Layer`; `beside` gives it a second input."""
    inputs = 2 * HIDDEN if flags.pop("beside", False) else HIDDEN

    def matrix(rows: int, columns: int, seed: int) -> object:
        weight = noise(rows, columns, seed=seed + 10 * index) * columns**-0.5
        return backend.matrix(weight.to(dtype), noise(rows, seed=seed).to(dtype) * 0.1)

    made = Layer(
        index=index,
        qkv=matrix((HEADS + 2 * KV_HEADS) * DIM, inputs, 1),
        o=matrix(HIDDEN, HEADS * DIM, 2),
        gate_up=matrix(2 * INNER, HIDDEN, 3),
        down=matrix(HIDDEN, INNER, 4),
        rope=Rope(DIM, 10000.0, None, 512, CPU),
        window=0,
        before_attention_C=1 + 0.1 * noise(HIDDEN, seed=5),
        before_mlp_C=1 + 0.1 * noise(HIDDEN, seed=6),
        beside_C=1 + 0.1 * noise(HIDDEN, seed=7) if inputs > HIDDEN else None,
    )
    return replace(made, **flags)  # type: ignore[arg-type]


class Draft:
    """Two sequences in a store, the second of which is run."""

    def __init__(self, backend: Backend, layers: Sequence[Layer], prefix: int) -> None:
        self.backend, self.layers = backend, layers
        dtype = backend.dtype if isinstance(backend, Compiled) else torch.float32
        self.dtype: torch.dtype = dtype
        self.store = KVStore(2, KV_HEADS, DIM, 400, dtype, CPU)
        self.other, self.span = self.store.open(), self.store.open()
        self.store.reserve(self.other, 20)
        self.store.reserve(self.span, prefix + 40)
        self.run(self.other, range(-1, 19), 20, noise(20, HIDDEN, seed=8))
        self.prefix = noise(prefix, HIDDEN, seed=9)

    def begin(self, span: Span, parents: Sequence[int], rows: int) -> None:
        packed = Packed(
            [0] * rows,
            array("i", [span.base]),
            array("i", [span.length]),
            array("i", [0, rows]),
            array("i", [0, len(parents)]),
            array("i", parents),
            [],
        )
        self.backend.begin(packed, self.store)

    def run(self, span: Span, parents: Sequence[int], rows: int, hidden: Tensor) -> Tensor:
        """Nodes with these parents, of which the last `rows` are run."""
        self.begin(span, parents, rows)
        beside = hidden.flip(-1).contiguous().to(self.dtype)
        return self.backend.run(hidden.to(self.dtype, copy=True), self.layers, beside)

    def commit(self, rows: int) -> Tensor:
        found = self.run(self.span, range(-1, rows - 1), rows, self.prefix[:rows])
        self.store.commit(self.span, range(rows))
        return found


KINDS: dict[str, dict[str, object]] = {
    "plain layer": {},
    "two inputs": {"beside": True},
    "two inputs, normed residual": {"beside": True, "normed_residual": True},
    "no norm": {"before_attention_C": None},
    "window": {"window": 7},
    "both ways": {"both_ways": True},
    "both ways, window": {"both_ways": True, "window": 3},
    "both ways, anchored": {"both_ways": True, "window": 7, "anchored": True},
    "anchored": {"window": 7, "anchored": True},
}


def block(backend: Backend, kind: str, prefix: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A prefix, then six rows behind it."""
    layers = [layer(backend, i, dtype, **KINDS[kind]) for i in range(2)]
    draft = Draft(backend, layers, prefix)
    draft.commit(prefix)
    return draft.run(draft.span, range(-1, 5), 6, noise(6, HIDDEN, seed=11))


@needs_compiler
@pytest.mark.parametrize("prefix", [3, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_plain(kind: str, prefix: int) -> None:
    found = block(make("compiled"), kind, prefix)
    torch.testing.assert_close(found, block(make("plain"), kind, prefix), atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(kind: str) -> None:
    found = block(make("compiled", torch.bfloat16), kind, 70, torch.bfloat16).float()
    exact = block(make("plain"), kind, 70)
    assert (found - exact).abs().mean() < 0.02 * exact.abs().mean()


def test_every_flag_changes_what_is_computed() -> None:
    """The control of the tests above."""
    results = {kind: block(make("plain"), kind, 30) for kind in KINDS}
    for one in results:
        for other in results:
            assert one == other or not torch.allclose(results[one], results[other], atol=1e-3)


BACKENDS = ["plain", pytest.param("compiled", marks=needs_compiler)]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("prefix", [2, 62, 130])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_tree_can_be_run_level_by_level(name: str, prefix: int, window: int) -> None:
    """Compiled: with the same bits as in one pass."""
    backend = make(name)
    draft = Draft(backend, [layer(backend, i, window=window) for i in range(2)], prefix)
    draft.commit(prefix)
    hidden = noise(len(TREE), HIDDEN, seed=12)
    whole = draft.run(draft.span, TREE, len(TREE), hidden)
    begin = 0
    for end in LEVELS:
        level = draft.run(draft.span, TREE[:end], end - begin, hidden[begin:end])
        tolerance = 0 if name == "compiled" else 1e-5
        torch.testing.assert_close(level, whole[begin:end], atol=tolerance, rtol=tolerance)
        begin = end


@pytest.mark.parametrize("name", BACKENDS)
def test_a_node_of_an_earlier_pass_is_seen_by_its_descendants_alone(name: str) -> None:
    backend = make(name)

    def last(first_level: Tensor) -> Tensor:
        draft = Draft(backend, [layer(backend, 0)], 10)
        draft.commit(10)
        draft.run(draft.span, [-1, -1], 2, first_level)
        return draft.run(draft.span, [-1, -1, 0, 1], 2, noise(2, HIDDEN, seed=13))

    hidden = noise(2, HIDDEN, seed=14)
    changed = hidden.clone()
    changed[0] += noise(HIDDEN, seed=15)
    assert not torch.equal(last(hidden)[0], last(changed)[0])
    assert torch.equal(last(hidden)[1], last(changed)[1])


@pytest.mark.parametrize("name", BACKENDS)
def test_appended_rows_lie_where_run_rows_would(name: str) -> None:
    """The keys and values of a first layer are made of its input alone."""
    backend = make(name)
    bare = layer(backend, 0, before_attention_C=None)
    run, appended = Draft(backend, [bare], 12), Draft(backend, [bare], 12)
    run.commit(12)
    appended.begin(appended.span, range(-1, 11), 12)
    backend.append(appended.prefix, [bare])
    torch.testing.assert_close(appended.store.kv[0], run.store.kv[0], atol=1e-6, rtol=1e-6)
    assert appended.store.kv[0, :, :, appended.span.base :].any()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_norms_equal_torch(dtype: torch.dtype) -> None:
    backend = make("compiled", dtype)
    x_NI, weight_OI, bias_O = noise(5, 96).to(dtype), noise(37, 96, seed=1).to(dtype), noise(37)
    found = backend.linear(x_NI, backend.matrix(weight_OI, bias_O))
    exact = torch.nn.functional.linear(x_NI.float(), weight_OI.float(), bias_O)
    precision = {"atol": 1e-4, "rtol": 1e-5 if dtype is torch.float32 else 2**-8}
    torch.testing.assert_close(found.float(), exact, **precision)
    norm_C = noise(96, seed=2)
    plain = Plain(CONFIG).norm(x_NI, norm_C)
    torch.testing.assert_close(backend.norm(x_NI, norm_C), plain, **precision)
    apart_NI = noise(5, 192, seed=4).to(dtype)[:, 96:]
    added = (x_NI.float() + torch.nn.functional.silu(apart_NI.float())).to(dtype)
    torch.testing.assert_close(backend.add_silu(x_NI, apart_NI), added, **precision)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_ranking_is_that_of_the_logits(dtype: torch.dtype, normed: bool) -> None:
    """Scratch is kept between calls: of more rows, of fewer, of another head."""
    backend = make("compiled", dtype)
    norm_C = noise(HIDDEN, seed=3) if normed else None
    for rows, size, top_k in ((3, 37, 4), (1, 300, 2), (9, 37, 1), (2, 300, 8)):
        x_NC = noise(rows, HIDDEN, seed=rows).to(dtype)
        head = backend.matrix(noise(size, HIDDEN, seed=1).to(dtype))
        columns, shares = backend.rank(x_NC, norm_C, head, top_k)
        top_NK, expected = backend.logits(x_NC, norm_C, head).softmax(-1).topk(top_k)
        assert columns == expected.tolist()
        torch.testing.assert_close(torch.tensor(shares), top_NK)
