"""Requests and contexts for drafters, and decoding without a model: the truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakes import FakeTarget, random_rule
from forerun.core import Draft, Request, SamplingParams
from forerun.drafters import DraftContext, Drafter, make_drafter
from forerun.models.hub import LoadedModel
from forerun.models.tokenizer import Tokenizer
from tiny import tiny_tokenizer


def request(
    tokens: Sequence[int],
    *,
    id: int = 0,
    max_tokens: int = 100,
    stop: Sequence[int] = (),
    **values: Any,
) -> Request:
    """A request whose prompt is `tokens`; greedy unless told otherwise."""
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **values})
    return Request(id, list(tokens), len(tokens), params, seed=7, stop_ids=frozenset(stop))


def refuse(name: str) -> LoadedModel:
    raise AssertionError(f"nothing should be loaded, not even {name}")


def make(spec: str, target: FakeTarget | None = None, **values: Any) -> Drafter:
    """A drafter over a fake target."""
    target = target or FakeTarget(random_rule())
    values = {"store": target.new_store(256), "tokenizer": None, "load": refuse, **values}
    drafter = make_drafter(spec, DraftContext(target, **values))
    assert drafter
    return drafter


def loaded(target: FakeTarget, extra_tokens: int = 0) -> LoadedModel:
    """A fake target as the hub would give it."""
    return LoadedModel("draft", target, Tokenizer(tiny_tokenizer(extra_tokens)), frozenset())


def propose(drafter: Drafter, request: Request, budget: int = 64) -> Draft:
    (draft,) = drafter.propose([request], [budget])
    check(draft)
    assert len(draft) <= budget
    return draft


def check(draft: Draft) -> None:
    """A tree, with survival that never grows on the way down."""
    for node, (parent, chance) in enumerate(zip(draft.parents, draft.survival, strict=True)):
        assert -1 <= parent < node
        assert 0 <= chance <= (draft.survival[parent] if parent >= 0 else 1.0)
    siblings = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(siblings)) == len(siblings), "a token is proposed twice in one place"


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """The token paths of a tree."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def replay(drafter: Drafter, request: Request, truth: Sequence[int]) -> list[tuple[Draft, int]]:
    """Decode `truth` as an engine would; per step, the draft and how many tokens were right."""
    steps = []
    end = len(request.tokens) + len(truth)
    while len(request.tokens) < end:
        left = truth[len(truth) - (end - len(request.tokens)) :]
        draft = propose(drafter, request)
        right = max(
            (len(path) for path in paths(draft) if path == tuple(left[: len(path)])), default=0
        )
        request.tokens += left[: right + 1]
        steps.append((draft, right))
        drafter.observe([request], [], ())
    return steps
