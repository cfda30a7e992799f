"""After a commit the next logits are those of a fresh pass over the same tokens."""

from __future__ import annotations

import random

import pytest
import torch

from fakes import FREE, ScriptedDrafter, greedy
from forerun.core import Draft, Request
from forerun.engine.engine import Engine
from forerun.models.cache import KVStore, Span
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment, Target
from forerun.verify import make_verifier
from tiny import VOCAB, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2, seed=2)


def fresh_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """Of the token behind `tokens`, from an empty store."""
    store = target.new_store(len(tokens))
    span = store.open()
    store.reserve(span, len(tokens))
    return target.forward([Segment(span, tokens, None, len(tokens) - 1)], store).logits_NV[0]


def assert_same(logits_V: torch.Tensor, expected_V: torch.Tensor) -> None:
    torch.testing.assert_close(logits_V, expected_V, rtol=1e-4, atol=1e-4)


class Sequences:
    """Sequences in one store; every row of every pass is compared with a fresh pass."""

    def __init__(self, target: Target, store: KVStore, seed: int) -> None:
        self.target, self.store = target, store
        self.dice = random.Random(seed)
        self.tokens: dict[Span, list[int]] = {}

    def open(self) -> None:
        span = self.store.open()
        self.tokens[span] = []

    def release(self, span: Span) -> None:
        self.store.release(span)
        del self.tokens[span]

    def segment(self, span: Span, tree: bool) -> Segment:
        rows = self.dice.randint(1, 9)
        self.store.reserve(span, rows)
        tokens = [self.dice.randrange(256) for _ in range(rows)]
        parents = [self.dice.randrange(-1, row) for row in range(rows)] if tree else None
        return Segment(span, tokens, parents)

    def path(self, segment: Segment, row: int) -> list[int]:
        """The rows from the root down to `row`."""
        if segment.parents is None:
            return list(range(row + 1))
        above = segment.parents[row]
        return [*(self.path(segment, above) if above >= 0 else []), row]

    def advance(self, tree: bool) -> None:
        """One pass over all sequences; each keeps a random path of its rows."""
        segments = [self.segment(span, tree) for span in self.tokens]
        logits = iter(self.target.forward(segments, self.store).logits_NV)
        for segment in segments:
            tokens = self.tokens[segment.span]
            for row in range(len(segment.tokens)):
                path = [segment.tokens[each] for each in self.path(segment, row)]
                assert_same(next(logits), fresh_logits(self.target, tokens + path))
            kept = self.path(segment, self.dice.randrange(len(segment.tokens)))
            self.store.commit(segment.span, kept)
            tokens += [segment.tokens[row] for row in kept]
        self.store.check()


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_every_row_sees_what_was_committed(model: LoadedModel, tree: bool) -> None:
    store = model.target.new_store(180)  # too small for three spans with their reserves
    sequences = Sequences(model.target, store, seed=7)
    for _ in range(3):
        sequences.open()
    for step in range(14):
        if step in (5, 10):  # its slots are used again
            sequences.release(next(iter(sequences.tokens)))
            sequences.open()
        sequences.advance(tree)
    assert max(map(len, sequences.tokens.values())) > 20


def test_keeping_the_wrong_rows_would_be_seen(model: LoadedModel) -> None:
    store = model.target.new_store(64)
    span = store.open()
    store.reserve(span, 8)
    model.target.forward([Segment(span, [1, 2, 3], [-1, 0, 0])], store)
    store.commit(span, [0, 1])  # the path of token 2, taken for that of token 3
    logits_V = model.target.forward([Segment(span, [4])], store).logits_NV[0]
    assert_same(logits_V, fresh_logits(model.target, [1, 2, 4]))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(logits_V, fresh_logits(model.target, [1, 3, 4]))


def test_the_engine_s_next_logits_are_those_of_a_fresh_pass(model: LoadedModel) -> None:
    """Several sequences with trees, some of whose nodes are right; requests end and others join."""
    target = model.target

    def script(request: Request, budget: int) -> Draft:
        dice = random.Random(len(request.tokens))
        likely = fresh_logits(target, request.tokens).topk(3).indices.tolist()
        again = fresh_logits(target, [*request.tokens, likely[0]]).topk(2).indices.tolist()
        tokens = [*likely, *again, dice.randrange(VOCAB)]
        order = [1, 0, 2] if dice.random() < 0.5 else [0, 1, 2]  # the right one first or second
        tokens[:3] = [likely[i] for i in order]
        best = order.index(0)
        tree = Draft(tokens, [-1, -1, -1, best, best, 3], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
        return tree if budget >= 6 else Draft()

    engine = Engine(
        target,
        store=target.new_store(250),
        verifier=make_verifier("follow"),
        drafter=ScriptedDrafter(script),
        max_num_seqs=3,
        max_batch_rows=40,
        costs=FREE,
    )
    prompts = [[1, 2, 3], [4] * 50, [5], [6, 7] * 5, [8, 9]]
    streams = [engine.add(prompt, greedy(18 + i))[0] for i, prompt in enumerate(prompts)]
    compared = 0
    while engine.busy:
        engine.step()
        for request in engine.scheduler.running:
            assert request.span
            if len(request.tokens) - request.cached != 1:
                continue
            engine.store.reserve(request.span, 1)
            segment = Segment(request.span, request.tokens[-1:])
            logits_V = target.forward([segment], engine.store).logits_NV[0]
            assert_same(logits_V, fresh_logits(target, request.tokens))
            compared += 1
    assert compared > 20
    assert engine.stats.accepted_tokens > 40
    for stream, prompt in zip(streams, prompts, strict=True):
        tokens = list(prompt)
        for token in stream.request.output:
            assert token == int(fresh_logits(target, tokens).argmax())
            tokens.append(token)
