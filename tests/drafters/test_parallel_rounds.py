"""Rounds in one compiled call propose what passes and trees in Python propose: Medusa, DFlash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.calibration import Calibration
from forerun.interop import dflash
from forerun.models import kernels
from forerun.models.heads.dflash import LayerAttention
from forerun.models.heads.dflash_runner import DFlashRunner
from forerun.models.hub import LoadedModel, load
from forerun.models.target import opened
from tiny_heads import tiny_dflash_module, tiny_medusa
from twins import SAMPLED, Twins

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

KINDS: dict[str, dict[str, Any]] = {
    "medusa, a matrix each": {},
    "medusa, one matrix, reduced": {"output": "one", "draft_vocab_size": 64, "layers": 2},
    "medusa, the target's matrix": {"output": "target", "vocab_size": None, "layers": 3},
    "medusa, no layer": {"layers": 0},
    "dflash, in place": {},
    "dflash, anchor first": {"anchor_first": True},
    "dflash, own mask": {"own_mask_embedding": True},
    "dflash, sliding": {
        "attention": (LayerAttention(window=6, causal=True), LayerAttention()),
        "window_from_anchor": True,
    },
    "dflash, own ends": {"draft_vocab_size": 100, "own_embedding": True},
}
SHAPES = ["top_k=1", "top_k=3,nodes=14", "k=2,top_k=5,nodes=9", "top_k=2,nodes=50"]
SOME = ["medusa, a matrix each", "dflash, in place"]


@pytest.fixture
def draft(folder: Path, target: LoadedModel, tmp_path: Path) -> Callable[[str], str]:
    """Writes a draft of a kind; its spec."""

    def write(kind: str) -> str:
        out, name, numbers = tmp_path / "draft", kind.split(",")[0], KINDS[kind]
        if name == "medusa":
            layout = "medusa" if numbers.get("output") == "target" else "vllm"
            tiny_medusa(out, folder, layout, strength=1.0, **numbers)
        else:
            module = tiny_dflash_module(target.target.info, **numbers)
            own_mask = module.config.own_mask_embedding
            dflash.export(module, "vllm" if own_mask else "speculators", out)
        return f"{name}:{out}"

    return write


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_passes_and_trees_in_python(
    target: LoadedModel, draft: Callable[[str], str], kind: str, shape: str
) -> None:
    twins = Twins(target, f"{draft(kind)},{shape}", seed=len(kind))
    assert len(twins.live(8)) > 2, "trees of several sizes"
    assert len(set(twins.ratios)) > 2, "beliefs are corrected"


@pytest.mark.parametrize("values", SAMPLED, ids=str)
@pytest.mark.parametrize("kind", ["medusa, one matrix, reduced", "dflash, in place"])
def test_the_same_where_requests_sample(
    target: LoadedModel, draft: Callable[[str], str], kind: str, values: dict[str, float]
) -> None:
    twins = Twins(target, f"{draft(kind)},top_k=4,nodes=14", seed=3)
    assert len(twins.live(8, **values)) > 2, "trees of several sizes"


@pytest.mark.parametrize("values", [{}, *SAMPLED], ids=str)
@pytest.mark.parametrize("kind", ["medusa, one matrix, reduced", "dflash, own ends"])
def test_what_is_given_to_be_joined(
    target: LoadedModel, draft: Callable[[str], str], kind: str, values: dict[str, float]
) -> None:
    """The candidates of each place, as Python would rank them."""
    twins = Twins(target, f"{draft(kind)},top_k=4,nodes=14", seed=3)
    requests = [twins.start(id, rows, **values) for id, rows in enumerate((9, 40, 3))]
    sources = twins.whole.sources(requests, [14, 0, 2])
    laws = twins.stepwise.laws(requests, [14, 0, 2])
    for source, law in zip(sources, laws, strict=True):
        assert (source.nodes, source.depth) == (law.nodes, law.depth)
        for place in range(law.depth):
            each = slice(place * source.width, (place + 1) * source.width)
            given = zip(source.alive._tokens[each], source.alive._beliefs[each], strict=True)
            possible = {token: belief for token, belief in given if belief > 0}
            assert possible == pytest.approx(dict(law.successors(place)), abs=1e-5)
    assert [source.nodes for source in sources] == [14, 0, 14]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_in_bfloat16(folder: Path, draft: Callable[[str], str], kind: str) -> None:
    target = load(str(folder), "bfloat16", "cpu")
    Twins(target, f"{draft(kind)},top_k=3,nodes=14", seed=1).live(6)


@pytest.mark.parametrize("kind", SOME)
def test_nothing_follows_the_end(
    target: LoadedModel, draft: Callable[[str], str], kind: str
) -> None:
    spec = f"{draft(kind)},top_k=3,nodes=16"
    twins = Twins(target, spec, seed=5)
    (free,) = twins.propose([twins.start(0, 9)], [64])
    inner = next(free.tokens[parent] for parent in free.parents if parent >= 0)
    again = Twins(target, spec, seed=5)
    (ending,) = again.propose([again.start(0, 9, stop=[inner])], [64])
    assert inner in ending.tokens
    assert all(ending.tokens[parent] != inner for parent in ending.parents if parent >= 0)


@pytest.mark.parametrize("kind", SOME)
def test_beside_a_request_that_samples_it_goes_on(
    target: LoadedModel, draft: Callable[[str], str], kind: str
) -> None:
    twins = Twins(target, f"{draft(kind)},top_k=2,nodes=9", seed=4)
    greedy, sampled = twins.start(0, 9), twins.start(1, 5, temperature=1.0)
    penalised = twins.start(2, 5, repetition_penalty=2.0)
    batches = ([greedy], [greedy, sampled], [greedy], [penalised, greedy], [greedy])
    for batch in batches:
        for asked, draft_ in zip(batch, twins.propose(batch, [64] * len(batch)), strict=True):
            twins.go_on(asked, draft_)


@pytest.mark.parametrize("kind", SOME)
def test_asking_twice_gives_the_same(
    target: LoadedModel, draft: Callable[[str], str], kind: str
) -> None:
    """The second time no context is due."""
    twins = Twins(target, f"{draft(kind)},top_k=3", seed=6)
    asked = twins.start(0, 9)
    assert twins.propose([asked], [64]) == twins.propose([asked], [64])


@pytest.mark.parametrize("kind", SOME)
def test_a_wrong_ratio_would_be_seen(
    target: LoadedModel, draft: Callable[[str], str], kind: str
) -> None:
    twins = Twins(target, f"{draft(kind)},top_k=3", seed=7)
    asked = twins.start(0, 9)
    twins.go_on(asked, *twins.propose([asked], [64]))
    twins.whole._calibration = Calibration()
    with pytest.raises(AssertionError):
        twins.propose([asked], [64])


@pytest.mark.parametrize("numbers", [{"embedding_scale": 3.0}, {"logit_softcap": 2.0}])
def test_what_is_scaled_or_capped_has_no_rounds(
    target: LoadedModel, numbers: dict[str, float]
) -> None:
    module = tiny_dflash_module(target.target.info, **numbers)
    assert DFlashRunner(module, opened(target.target, "dflash"), 64).rounds is None
