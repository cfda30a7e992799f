"""A target and a drafter that do as they are told, so that tests know what has to come out.

The target's keys and values are the tokens and their positions: what it answers depends on the
store alone, so a slot that was lost, moved wrongly or written twice changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import torch

from forerun.config import Settings
from forerun.core import Draft, Request, SamplingParams
from forerun.drafters.base import Drafter
from forerun.engine.costs import Costs
from forerun.engine.engine import Engine
from forerun.models.cache import KVStore
from forerun.models.target import Forward, Segment, TargetInfo
from forerun.models.tokenizer import Tokenizer
from forerun.verify import make_verifier
from tiny import END, VOCAB, tiny_tokenizer

Rule = Callable[[tuple[int, ...]], torch.Tensor]  # a path's tokens -> logits of what follows
FREE = Costs({1: 1.0})  # seconds: rows cost nothing, so the plan keeps every node


def random_rule(vocab: int = 16, memory: int | None = 2, scale: float = 2.0) -> Rule:
    """A pseudo-random law of the last `memory` tokens; None: of all of them."""

    @cache
    def law(ending: tuple[int, ...]) -> torch.Tensor:
        noise = torch.Generator().manual_seed(hash(ending) & 0xFFFFFFFF)
        return torch.randn(vocab, generator=noise) * scale

    return lambda path: law(path[-memory:] if memory else path)


def script_rule(prompt_length: int, answer: Sequence[int], vocab: int = VOCAB) -> Rule:
    """Says `answer` behind a prompt, whatever it is, then END."""

    def law(path: tuple[int, ...]) -> torch.Tensor:
        place = len(path) - prompt_length
        logits = torch.zeros(vocab)
        logits[answer[place] if place < len(answer) else END] = 20.0
        return logits

    return law


class FakeTarget:
    """Answers by a rule; `passes` holds the number of rows of every pass."""

    def __init__(self, rule: Rule, max_length: int = 512) -> None:
        self.rule = rule
        self.vocab = len(rule((0,)))
        self.passes: list[int] = []
        self.info = TargetInfo(
            name="fake",
            architecture="fake",
            vocab_size=self.vocab,
            hidden_size=1,
            layers=2,
            max_length=max_length,
            dtype=torch.float32,
            device=torch.device("cpu"),
            row_invariant=True,
            tree_invariant=True,
        )

    def new_store(self, slots: int) -> KVStore:
        return KVStore(1, 1, 1, slots, torch.float32, torch.device("cpu"))

    def forward(
        self,
        segments: Sequence[Segment],
        store: KVStore,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> Forward:
        logits, tapped = [], []
        for segment in segments:
            for row, path in enumerate(self._paths(segment, store)):
                tapped.append([[float(path[-1])] * len(taps)])
                if row >= segment.logits_from:
                    logits.append(self.rule(path))
        self.passes.append(len(tapped))
        logits_NV = torch.stack(logits) if logits else torch.empty(0, self.vocab)
        taps_RTD = torch.tensor(tapped).view(len(tapped), len(taps), 1) if taps else None
        return Forward(logits_NV, taps_RTD)

    def _paths(self, segment: Segment, store: KVStore) -> list[tuple[int, ...]]:
        """Write the rows of a segment; per row, all tokens up to it as the store holds them."""
        span = segment.span
        assert span.length + len(segment.tokens) <= span.capacity, "no room was reserved"
        keys, values = store.kv[0, 0, 0, :, 0], store.kv[0, 1, 0, :, 0]
        prefix = keys[span.base : span.base + span.length].int().tolist()
        positions = values[span.base : span.base + span.length].int().tolist()
        blank = span.length > 1 and not any(positions)  # as `costs.measure` makes them
        assert blank or positions == list(range(span.length)), "committed slots in a wrong order"
        paths: list[tuple[int, ...]] = []
        for row, token in enumerate(segment.tokens):
            parent = row - 1 if segment.parents is None else segment.parents[row]
            assert -1 <= parent < row
            paths.append((*(paths[parent] if parent >= 0 else prefix), token))
            slot = span.base + span.length + row
            keys[slot], values[slot] = token, len(paths[-1]) - 1
        return paths


class ScriptedDrafter(Drafter):
    """Proposes what a function says; remembers what it was told."""

    name = "script"
    options = Settings
    example = "script"

    def __init__(
        self,
        script: Callable[[Request, int], Draft],
        taps: Sequence[int] = (),
        samples: bool = False,
    ) -> None:
        self.script = script
        self.taps = taps
        self.samples = samples
        self.observed: list[tuple[int, object, torch.Tensor | None]] = []
        self.released: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        for request in requests:
            assert request.cached == len(request.tokens) - 1, "all but the last token are cached"
        return [self.script(*each) for each in zip(requests, budgets, strict=True)]

    def observe(self, requests, verdicts, taps) -> None:  # type: ignore[no-untyped-def]
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            self.observed.append((request.id, verdict, taps[i] if len(taps) else None))

    def release(self, request: Request) -> None:
        self.released.append(request.id)


def chain_of(tokens: Sequence[int], survival: float = 0.9) -> Draft:
    """A draft of one chain."""
    chances = [survival ** (depth + 1) for depth in range(len(tokens))]
    return Draft(list(tokens), list(range(-1, len(tokens) - 1)), chances)


def greedy_path(rule: Rule, tokens: Sequence[int], length: int) -> list[int]:
    """What follows `tokens` greedily."""
    path = list(tokens)
    for _ in range(length):
        path.append(int(rule(tuple(path)).argmax()))
    return path[len(tokens) :]


def right(rule: Rule, nodes: int = 4) -> Callable[[Request, int], Draft]:
    """A script that is always right under greedy decoding."""
    return lambda request, budget: chain_of(greedy_path(rule, request.tokens, min(nodes, budget)))


def wrong(rule: Rule, vocab: int = 16) -> Callable[[Request, int], Draft]:
    """A script that is never right under greedy decoding."""

    def script(request: Request, budget: int) -> Draft:
        tokens = greedy_path(rule, request.tokens, min(4, budget))
        return chain_of([(token + 1) % vocab for token in tokens])

    return script


def wild(rule: Rule, vocab: int = 16) -> Callable[[Request, int], Draft]:
    """A script of random trees: right, wrong and duplicate siblings at every depth."""

    def script(request: Request, budget: int) -> Draft:
        dice = random.Random(len(request.tokens) * 31 + request.id)
        paths: list[list[int]] = []
        parents: list[int] = []
        survival: list[float] = []
        for node in range(min(budget, dice.randrange(10))):
            parent = dice.randrange(-1, node)
            prefix = paths[parent] if parent >= 0 else list(request.tokens)
            token = dice.choice([greedy_path(rule, prefix, 1)[0], dice.randrange(vocab)])
            paths.append([*prefix, token])
            parents.append(parent)
            survival.append(0.7 * (survival[parent] if parent >= 0 else 1.0))
        return Draft([path[-1] for path in paths], parents, survival)

    return script


def fake_engine(
    rule: Rule,
    script: Callable[[Request, int], Draft] | None = None,
    *,
    slots: int = 512,
    max_length: int = 512,
    verifier: str = "follow",
    tokenizer: bool = False,
    **options: object,
) -> Engine:
    """An engine over a fake target; rows are free, so the plan keeps every node."""
    target = FakeTarget(rule, max_length)
    return Engine(
        target,
        store=target.new_store(slots),
        verifier=make_verifier(verifier),
        drafter=ScriptedDrafter(script) if script else None,
        tokenizer=Tokenizer(tiny_tokenizer()) if tokenizer else None,
        costs=FREE,
        **options,
    )


def greedy(max_tokens: int = 20, **values: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **values)


def run(engine: Engine, jobs: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
    """Run all to their end, checking the store after every step; the output tokens."""
    streams = [stream for prompt, params in jobs for stream in engine.add(prompt, params)]
    while engine.busy:
        engine.step()
        engine.store.check()
    assert engine.store.free_slots == engine.store.slots, "every slot was given back"
    return [stream.request.output for stream in streams]
