from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafting import make, request
from fakes import FakeTarget, greedy_path, random_rule
from forerun.core import Request
from forerun.drafters import Drafter
from forerun.drafters.skip import kept_layers
from forerun.errors import ConfigError
from forerun.models.cache import KVStore
from forerun.models.target import Forward, Segment

FULL = random_rule(memory=None, scale=4.0)
SHORT = random_rule(vocab=16, memory=3, scale=5.0)


class LayeredTarget(FakeTarget):
    """Six layers; answers by another rule where some are left out."""

    def __init__(self) -> None:
        super().__init__(FULL)
        self.info = replace(self.info, layers=6)
        self.ran: list[Sequence[int] | None] = []

    def forward(
        self,
        segments: Sequence[Segment],
        store: KVStore,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> Forward:
        self.ran.append(layers)
        self.rule = FULL if layers is None else SHORT
        return super().forward(segments, store, taps)


def feed(target: FakeTarget, store: KVStore, request: Request) -> list[int]:
    """Plain decoding's part: cache all that is pending; the target's next token."""
    request.span = request.span or store.open()
    rows = request.tokens[request.cached :]
    store.reserve(request.span, len(rows))
    logits_NV = target.forward([Segment(request.span, rows)], store).logits_NV
    store.commit(request.span, range(len(rows)))
    return [int(logits_NV[-1].argmax())]


def setting(slots: int = 256, options: str = "k=4,min_prob=0") -> tuple[Drafter, Any, KVStore]:
    target = LayeredTarget()
    store = target.new_store(slots)
    drafter = make(f"skip:2,{options}", target, store=store)
    target.ran.clear()
    target.passes.clear()
    return drafter, target, store


@pytest.mark.parametrize(
    ("layers", "skipped", "kept"),
    [
        (3, 1, [0, 2]),
        (4, 1, [0, 1, 3]),
        (6, 2, [0, 1, 3, 5]),
        (6, 4, [0, 5]),
        (8, 3, [0, 1, 3, 5, 7]),
        (30, 4, [i for i in range(30) if i not in (4, 11, 18, 25)]),
    ],
)
def test_skipped_layers_are_spread_over_the_middle(
    layers: int, skipped: int, kept: list[int]
) -> None:
    assert kept_layers(layers, skipped) == kept


@pytest.mark.parametrize(
    ("layers", "skipped", "message"),
    [
        (6, 5, "skip:5 .* of 6 layers.*; leave out at most 4"),
        (2, 1, "of 2 layers.*; choose ngram or suffix"),
    ],
)
def test_the_first_and_last_layer_stay(layers: int, skipped: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kept_layers(layers, skipped)


def test_it_drafts_with_fewer_layers_and_forgets_its_rows() -> None:
    drafter, target, store = setting()
    asked = request([1, 2, 3])
    for _ in range(10):
        asked.tokens += feed(target, store, asked)
        target.ran.clear()
        (draft,) = drafter.propose([asked], [4])
        assert draft.tokens == greedy_path(SHORT, asked.tokens, 4)
        assert target.ran == [[0, 1, 3, 5]] * 4
        assert asked.cached == len(asked.tokens) - 1
    # The drafted rows changed nothing: the output is that of the full model alone.
    assert asked.output == greedy_path(FULL, [1, 2, 3], 10)
    store.check()


def test_a_batch_takes_one_pass_per_token() -> None:
    drafter, target, store = setting()
    batch = [request([id, 2, 3], id=id) for id in range(3)]
    for each in batch:
        each.tokens += feed(target, store, each)
    target.passes.clear()
    drafts = drafter.propose(batch, [4, 0, 2])
    assert target.passes == [2, 2, 1, 1]
    assert [len(draft) for draft in drafts] == [4, 0, 2]


def test_without_room_it_says_nothing() -> None:
    drafter, target, store = setting(slots=64)
    asked = request([1] * 61)
    asked.tokens += feed(target, store, asked)
    assert [len(d) for d in drafter.propose([asked], [4])] == [0]
    assert [len(d) for d in drafter.propose([asked], [3])] == [3]
    assert asked.cached == 61


def test_an_interrupted_draft_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target, store = setting()
    asked = request([1, 2, 3])
    asked.tokens += feed(target, store, asked)
    forward = target.forward

    def interrupted(*args: Any, **values: Any) -> Forward:
        if len(target.passes) == 3:
            raise KeyboardInterrupt
        return forward(*args, **values)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafter.propose([asked], [4])
    assert asked.cached == 3


def test_a_target_that_cannot_leave_layers_out_is_refused_at_once() -> None:
    class Whole(LayeredTarget):
        def forward(
            self, *args: Any, layers: Sequence[int] | None = None, **values: Any
        ) -> Forward:
            if layers is not None:
                raise ConfigError("this model cannot leave layers out; choose ngram")
            return super().forward(*args, **values)

    target = Whole()
    store = target.new_store(64)
    with pytest.raises(ConfigError, match="cannot leave layers out"):
        make("skip:2", target, store=store)
    assert store.free_slots == 64
