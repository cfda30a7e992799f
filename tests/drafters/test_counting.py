"""Compiled rounds of drafters that count draft what their Python twins draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafting import make, request
from fakes import FakeTarget, script_rule
from forerun.core import Draft, Request
from forerun.drafters import corpus_file
from forerun.drafters.corpus_file import Header
from forerun.drafters.lookup import LawLookup
from forerun.models import kernels
from forerun.train.corpus import build
from tiny_corpus import example

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

VOCAB = 16


def text(dice: random.Random, length: int, rule: int = 5) -> list[int]:
    """Tokens that often follow from the two before them."""
    found = [dice.randrange(VOCAB), 1]
    while len(found) < length:
        a, b = found[-2:]
        often = dice.random() < 0.7
        found.append((a * rule + b) % VOCAB if often else dice.randrange(VOCAB))
    return found


@pytest.fixture(params=[VOCAB, 70000], ids=["uint16", "uint32"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    dice = random.Random(1)
    counted = build([example(text(dice, 200)) for _ in range(20)], request.param, order=3)
    size = request.param
    header = Header(model="fake", vocab_size=size, vocabulary="v", order=3, data="d", counted=4000)
    corpus_file.write(tmp_path / str(size), header, counted)
    return f"corpus:{tmp_path / str(size)}"


def twins(spec: str) -> tuple[LawLookup, LawLookup]:
    size = int(spec.split("/")[-1].split(",")[0]) if "corpus" in spec else VOCAB
    target = FakeTarget(script_rule(1, [0], vocab=size))
    compiled, plain = make(spec, target), make(spec, target)
    assert isinstance(compiled, LawLookup)
    assert isinstance(plain, LawLookup)
    assert compiled._rounds
    plain._rounds = None
    return compiled, plain


def drafts_alike(one: Draft, other: Draft) -> bool:
    return (
        list(one.tokens) == list(other.tokens)
        and list(one.parents) == list(other.parents)
        and list(one.survival) == pytest.approx(list(other.survival), rel=1e-9)
    )


def follow(spec: str, requests: Sequence[Request], truths: Sequence[list[int]], seed: int) -> int:
    """Let both draft while the texts grow; how many nodes they proposed."""
    dice, nodes = random.Random(seed), 0
    compiled, plain = twins(spec)
    while all(truths):
        budgets = [dice.choice((0, 1, 5, 64)) for _ in requests]
        drafts = [each.propose(requests, budgets) for each in (compiled, plain)]
        for one, other in zip(*drafts, strict=True):
            assert drafts_alike(one, other), spec
            nodes += len(one)
        for each, truth in zip(requests, truths, strict=True):
            count = dice.randint(1, 3)
            each.tokens += truth[:count]
            del truth[:count]
        for drafter in (compiled, plain):
            drafter.observe(requests, [], [])
    return nodes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", ["", ",k=2,min_prob=0", ",nodes=64,min_prob=0.001"])
def test_trees_of_a_corpus_are_those_of_python(
    corpus: str, options: str, temperature: float
) -> None:
    dice = random.Random(2)
    requests, truths = [], []
    for id in range(3):
        whole = text(dice, 90, rule=5 + id % 2)
        requests.append(
            request(whole[:20], id=id, max_tokens=300, temperature=temperature, stop=[3])
        )
        truths.append(whole[20:])
    assert follow(corpus + options, requests, truths, 3) > 100


@pytest.mark.parametrize("spec", ["suffix", "suffix:k=3,order=1", "suffix:order=2,min_prob=0"])
def test_trees_of_what_a_request_repeats_are_those_of_python(spec: str) -> None:
    dice = random.Random(4)
    requests, truths = [], []
    for id in range(4):
        whole = text(dice, 120) if id else [7] * 120  # one that says the same all the time
        requests.append(request(whole[:6], id=id, max_tokens=120 + 60 * id))
        truths.append(whole[6:])
    assert follow(spec, requests, truths, 5) > 100


def test_the_end_of_an_answer_is_not_passed(corpus: str) -> None:
    dice = random.Random(6)
    for spec in (corpus, "suffix"):
        compiled, plain = twins(spec)
        whole = text(dice, 100)
        for left in (1, 2, 3):
            asked = request(whole, id=left, max_tokens=left)
            drafts = [each.propose([asked], [64])[0] for each in (compiled, plain)]
            assert drafts_alike(*drafts)
            assert (len(drafts[0]) == 0) == (left == 1)


def test_what_was_learned_is_forgotten_with_a_request(corpus: str) -> None:
    compiled, _ = twins(corpus)
    one, two = request([1, 2], id=1), request([9, 2], id=2)
    compiled.propose([one, two], [4, 4])
    compiled.release(one)
    assert compiled._rounds
    assert list(compiled._rounds._texts) == [2]
    again = request([5, 6, 7], id=1)  # the number of another text now
    plain = twins(corpus)[1]
    assert drafts_alike(compiled.propose([again], [8])[0], plain.propose([again], [8])[0])
