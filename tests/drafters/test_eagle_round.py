"""Rounds in one compiled call propose what trees grown level by level in Python propose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting import check, refuse, request
from forerun.core import Draft, Request, Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.tree import path
from forerun.models import kernels
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel
from tiny import tiny_llama
from tiny_heads import tiny_eagle

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

FLAGS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "reduced": {"draft_vocab_size": 64, "norm_before_fc": True, "norm_before_residual": True},
    "window": {"sliding_window": 6, "qk_norm": True, "own_embedding": True},
}
SHAPES = ["top_k=1", "top_k=3,nodes=14", "k=6,top_k=5,nodes=9", "top_k=2,nodes=50"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=1)


class Twins:
    """Two drafters that are told the same: one drafts in rounds, the other level by level."""

    def __init__(self, target: LoadedModel, spec: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.info = target.target.info
        context = DraftContext(target.target, target.target.new_store(512), None, refuse)
        self.drafters = [make_drafter(spec, context) for _ in range(2)]
        whole, stepwise = self.drafters
        assert isinstance(whole, EagleDrafter)
        assert isinstance(stepwise, EagleDrafter)
        assert whole._runner.rounds is not None
        stepwise._runner.rounds = None
        self.whole, self.stepwise = whole, stepwise

    def start(self, id: int, rows: int, stop: Sequence[int] = (), **values: Any) -> Request:
        started = request(self.tokens(rows + 1), id=id, max_tokens=300, stop=stop, **values)
        started.span = Span(0, 300)
        self.observe(started, rows)
        return started

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(250) for _ in range(count)]

    def observe(self, request: Request, rows: int) -> None:
        assert request.span
        request.span.length += rows
        shape = (rows, len(self.whole.taps), self.info.hidden_size)
        taps_RTC = torch.randn(shape, generator=self.noise).to(self.info.dtype)
        for drafter in (self.whole, self.stepwise):
            drafter.observe([request], [Verdict((), request.tokens[-1])], [taps_RTC])

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """What both propose."""
        drafts = self.whole.propose(requests, budgets)
        expected = self.stepwise.propose(requests, budgets)
        for draft, other in zip(drafts, expected, strict=True):
            check(draft)
            assert draft.tokens == other.tokens
            assert draft.parents == other.parents
            assert draft.survival == pytest.approx(other.survival, abs=1e-6)
        return drafts

    def go_on(self, request: Request, draft: Draft) -> None:
        """Commit some path of a draft and a token more."""
        node = self.dice.randrange(-1, len(draft))
        accepted = [draft.tokens[n] for n in path(draft.parents, node)]
        request.tokens += [*accepted, *self.tokens(1)]
        self.observe(request, len(accepted) + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flags", FLAGS)
def test_equals_growth_level_by_level(
    target: LoadedModel, tmp_path: Path, flags: str, shape: str
) -> None:
    """Requests of several lengths, one of which comes late; budgets that differ; beliefs that prove
    wrong."""
    folder = tiny_eagle(tmp_path / "draft", target, layout="speculators", seed=3, **FLAGS[flags])
    twins = Twins(target, f"eagle3:{folder},min_prob=0.02,{shape}", seed=len(flags))
    requests = [twins.start(id, rows) for id, rows in enumerate((9, 40, 3))]
    sizes = set()
    for turn in range(8):
        if turn == 4:
            requests.append(twins.start(9, 17, stop=range(0, 250, 3)))
        budgets = [twins.dice.choice([1, 4, 64, 64]) for _ in requests]
        drafts = twins.propose(requests, budgets)
        sizes |= {len(draft) for draft in drafts}
        for asked, draft in zip(requests, drafts, strict=True):
            twins.go_on(asked, draft)
        if turn % 3 == 2:
            twins.go_on(requests[0], Draft())  # steps without a proposal leave two rows due
    assert len(sizes) > 2, "trees of several sizes"
    ratios = list(twins.whole._calibration.ratios)
    assert len(set(ratios)) > 2, "beliefs are corrected"
    assert ratios == pytest.approx(list(twins.stepwise._calibration.ratios), abs=1e-6)


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


def test_beside_a_request_that_samples_it_goes_on(target: LoadedModel, tmp_path: Path) -> None:
    """Rows of rounds and rows of levels follow each other."""
    folder = tiny_eagle(tmp_path / "draft", target)
    twins = Twins(target, f"eagle3:{folder},k=4,top_k=2,nodes=9,min_prob=0", seed=4)
    greedy, sampled = twins.start(0, 9), twins.start(1, 5, temperature=1.0)
    for batch in ([greedy], [greedy, sampled], [greedy], [greedy, sampled], [greedy]):
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
