"""Rounds in one compiled call propose what trees grown level by level in Python propose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.calibration import Calibration
from forerun.models import kernels
from forerun.models.hub import LoadedModel, load
from tiny_heads import tiny_eagle
from twins import SAMPLED, Twins

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

EAGLE_1 = {"kind": "eagle", "layout": "vllm"}
FLAGS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "reduced": {"draft_vocab_size": 64, "norm_before_fc": True, "norm_before_residual": True},
    "window": {"sliding_window": 6, "qk_norm": True, "own_embedding": True},
    "lent head": {"own_head": False, "layout": "vllm"},
    "eagle": EAGLE_1,
    "two layers": {**EAGLE_1, "layers": 2, "fc_bias": False, "own_embedding": True},
}
SHAPES = ["top_k=1", "top_k=3,nodes=14", "k=6,top_k=5,nodes=9", "top_k=2,nodes=50"]


def drafted(folder: Path, target: LoadedModel, flags: str) -> str:
    """The spec of a draft, without options."""
    numbers = {"kind": "eagle3", "layout": "speculators", **FLAGS[flags]}
    return f"{numbers['kind']}:{tiny_eagle(folder / 'draft', target, seed=3, **numbers)}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flags", FLAGS)
def test_equals_growth_level_by_level(
    target: LoadedModel, tmp_path: Path, flags: str, shape: str
) -> None:
    spec = f"{drafted(tmp_path, target, flags)},min_prob=0.02,{shape}"
    twins = Twins(target, spec, seed=len(flags))
    assert len(twins.live(8)) > 2, "trees of several sizes"
    assert len(set(twins.ratios)) > 2, "beliefs are corrected"


@pytest.mark.parametrize("values", SAMPLED, ids=str)
@pytest.mark.parametrize("flags", ["eagle3", "reduced"])
def test_equals_growth_where_requests_sample(
    target: LoadedModel, tmp_path: Path, flags: str, values: dict[str, float]
) -> None:
    twins = Twins(target, f"{drafted(tmp_path, target, flags)},min_prob=0.01,top_k=4", seed=3)
    assert len(twins.live(8, **values)) > 2, "trees of several sizes"


def test_more_candidates_than_race_otherwise(target: LoadedModel, tmp_path: Path) -> None:
    spec = f"{drafted(tmp_path, target, 'eagle3')},min_prob=0,k=2,top_k=150,nodes=200"
    twins = Twins(target, spec, seed=9)
    (draft,) = twins.propose([twins.start(0, 9, temperature=1.5)], [200])
    assert draft.parents.count(-1) > 1


@pytest.mark.parametrize("flags", FLAGS)
def test_the_same_in_bfloat16(folder: Path, tmp_path: Path, flags: str) -> None:
    target = load(str(folder), "bfloat16", "cpu")
    spec = f"{drafted(tmp_path, target, flags)},min_prob=0.02,top_k=3,nodes=14"
    Twins(target, spec, seed=1).live(6)


@pytest.mark.parametrize("floor", [0, 0.05, 0.3, 1])
def test_a_floor_ends_the_same_levels(target: LoadedModel, tmp_path: Path, floor: float) -> None:
    folder = tiny_eagle(tmp_path / "draft", target)
    twins = Twins(target, f"eagle3:{folder},k=5,top_k=3,nodes=20,min_prob={floor}", seed=2)
    (draft,) = twins.propose([twins.start(0, 9)], [64])
    assert len(draft) == 3 if floor == 1 else len(draft) >= 3


def test_nothing_follows_the_end(target: LoadedModel, tmp_path: Path) -> None:
    folder = tiny_eagle(tmp_path / "draft", target)
    spec = f"eagle3:{folder},k=4,top_k=3,nodes=16,min_prob=0"
    twins = Twins(target, spec, seed=5)
    (free,) = twins.propose([twins.start(0, 9)], [64])
    inner = next(free.tokens[parent] for parent in free.parents if parent >= 0)
    again = Twins(target, spec, seed=5)
    (ending,) = again.propose([again.start(0, 9, stop=[inner])], [64])
    assert inner in ending.tokens
    assert all(ending.tokens[parent] != inner for parent in ending.parents if parent >= 0)


def test_beside_a_request_with_penalties_it_goes_on(target: LoadedModel, tmp_path: Path) -> None:
    """Rows of rounds and rows of levels follow each other."""
    folder = tiny_eagle(tmp_path / "draft", target)
    twins = Twins(target, f"eagle3:{folder},k=4,top_k=2,nodes=9,min_prob=0", seed=4)
    greedy, penalised = twins.start(0, 9), twins.start(1, 5, repetition_penalty=2.0)
    for batch in ([greedy], [greedy, penalised], [greedy], [greedy, penalised], [greedy]):
        for asked, draft in zip(batch, twins.propose(batch, [64] * len(batch)), strict=True):
            twins.go_on(asked, draft)


def test_asking_twice_gives_the_same(target: LoadedModel, tmp_path: Path) -> None:
    """The second time no row is due."""
    twins = Twins(target, f"eagle3:{tiny_eagle(tmp_path / 'draft', target)},top_k=3", seed=6)
    asked = twins.start(0, 9)
    assert twins.propose([asked], [64]) == twins.propose([asked], [64])


def test_a_wrong_ratio_would_be_seen(target: LoadedModel, tmp_path: Path) -> None:
    twins = Twins(target, f"eagle3:{tiny_eagle(tmp_path / 'draft', target)},top_k=3", seed=7)
    asked = twins.start(0, 9)
    twins.go_on(asked, *twins.propose([asked], [64]))
    twins.whole._calibration = Calibration()
    with pytest.raises(AssertionError):
        twins.propose([asked], [64])


def test_wrong_noise_would_be_seen(target: LoadedModel, tmp_path: Path) -> None:
    twins = Twins(target, f"eagle3:{tiny_eagle(tmp_path / 'draft', target)},top_k=3", seed=8)
    asked = twins.start(0, 9, temperature=1.0)
    twins.propose([asked], [64])
    twins.whole._calibration._trees[0].sampling.seed += 1
    with pytest.raises(AssertionError):
        twins.propose([asked], [64])
