"""Trees joined in one compiled call are those that Python joins, and so is what is learned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from drafting import make, request
from fakes import FakeTarget, script_rule
from forerun.core import Draft, Request
from forerun.drafters import Drafter, corpus_file
from forerun.drafters.calibration import Calibration
from forerun.drafters.corpus_file import Header
from forerun.drafters.joined import Joined
from forerun.drafters.laws import Law
from forerun.drafters.marginals import Candidates, law_of
from forerun.drafters.sources import Source
from forerun.models import kernels
from forerun.models.heads.rounds import Ranked
from forerun.train.corpus import build
from tiny_corpus import example

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

VOCAB = 16


def text(dice: random.Random, length: int) -> list[int]:
    """Tokens that often follow from the two before them."""
    found = [dice.randrange(VOCAB), 1]
    while len(found) < length:
        a, b = found[-2:]
        found.append((a * 5 + b) % VOCAB if dice.random() < 0.7 else dice.randrange(VOCAB))
    return found


class Network(Drafter):
    """Half knows the rule of `text`; what it says depends on the text alone."""

    name = "network"

    def __init__(self) -> None: ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._tree(each.tokens) for each in requests]

    def _tree(self, tokens: list[int]) -> Draft:
        dice = random.Random(f"{tokens[-3:]}")
        if dice.random() < 0.1:
            return Draft()
        drafted: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        for node in range(dice.randint(1, 9)):
            parent = dice.randrange(-1, node)
            while True:
                token = dice.randrange(VOCAB)
                if (parent, token) not in zip(parents, drafted, strict=True):
                    break
            drafted.append(token)
            parents.append(parent)
            above = survival[parent] if parent >= 0 else 1.0
            survival.append(above * dice.choice((0.0, 0.05, 0.3, 0.9)))
        return Draft(drafted, parents, survival)


class Heads(Drafter):
    """A law for each of three places."""

    name = "heads"

    def __init__(self) -> None: ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        raise AssertionError("laws are asked for")

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        return [
            law_of(Candidates(*zip(*self._places(each), strict=True)), nodes=6) for each in requests
        ]

    def sources(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Source]:
        found = []
        for each in requests:
            tokens, beliefs = zip(*self._places(each), strict=True)
            found.append(Source.of_places(Ranked.of(tokens, beliefs), nodes=6))
        return found

    def _places(self, request: Request) -> list[tuple[list[int], list[float]]]:
        dice = random.Random(f"{request.tokens[-2:]}")
        a, b = request.tokens[-2:]
        first = (a * 5 + b) % VOCAB
        found = []
        for _ in range(3):
            others = [token for token in range(VOCAB) if token != first]
            found.append(([first, *dice.sample(others, 2)], [0.5, 0.25, dice.choice((0.125, 0.0))]))
            first = dice.randrange(VOCAB)
        return found


def corpus(folder: Path) -> Drafter:
    dice = random.Random(1)
    counted = build([example(text(dice, 200)) for _ in range(10)], VOCAB, order=3)
    header = Header(model="fake", vocab_size=VOCAB, vocabulary="v", order=3, data="d", counted=4000)
    corpus_file.write(folder / "corpus", header, counted)
    return make(f"corpus:{folder / 'corpus'}", FakeTarget(script_rule(1, [0], vocab=VOCAB)))


def lookup(spec: str) -> Drafter:
    return make(spec, FakeTarget(script_rule(1, [0], vocab=VOCAB)))


def joined(kinds: str, folder: Path) -> Joined:
    made = {
        "corpus": lambda: corpus(folder),
        "network": Network,
        "heads": Heads,
        "suffix": lambda: lookup("suffix"),
        "ngram": lambda: lookup("ngram"),
    }
    return Joined([made[kind]() for kind in kinds.split("+")])


KINDS = [
    "corpus+network",
    "corpus+heads",
    "heads+network",
    "suffix+corpus+network",
    "ngram+heads+suffix+network",
]


class Twins:
    """Two joined drafters that are told the same; one of them asks Python for its laws."""

    def __init__(self, kinds: str, folder: Path) -> None:
        self.compiled, self.plain = joined(kinds, folder), joined(kinds, folder)
        assert self.compiled._rounds
        self.plain._rounds = None

    def live(self, requests: Sequence[Request], truths: Sequence[list[int]]) -> Iterator[Draft]:
        dice = random.Random(2)
        while all(truths):
            budgets = [dice.choice((0, 1, 5, 64)) for _ in requests]
            ways = [way for way, each in enumerate(self.plain.ways) if len(each.members) > 1]
            way = dice.choice(ways)
            drafts = [each.ways[way].propose(requests, budgets) for each in self]
            for one, other in zip(*drafts, strict=True):
                assert (list(one.tokens), list(one.parents)) == (
                    list(other.tokens),
                    list(other.parents),
                )
                assert list(one.survival) == pytest.approx(list(other.survival), rel=1e-7)
                assert list(one.sources) == list(other.sources)
                yield one
            for each, truth in zip(requests, truths, strict=True):
                count = dice.randint(1, 3)
                each.tokens += truth[:count]
                del truth[:count]
            for drafter in self:
                drafter.observe(requests, [], ())

    def __iter__(self) -> Iterator[Joined]:
        return iter((self.compiled, self.plain))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kinds", KINDS)
def test_trees_are_those_of_python(kinds: str, temperature: float, tmp_path: Path) -> None:
    dice = random.Random(3)
    requests, truths = [], []
    for id in range(4):
        whole = text(dice, 90)
        requests.append(
            request(whole[:12], id=id, max_tokens=60 + 20 * id, temperature=temperature, stop=[3])
        )
        truths.append(whole[12:])
    twins = Twins(kinds, tmp_path)
    nodes = sum(len(draft) for draft in twins.live(requests, truths))
    assert nodes > 300
    assert twins.compiled._rounds
    learned = twins.compiled._rounds._weights[temperature == 0]
    fresh = Joined(twins.plain.drafters)._rounds
    assert fresh
    changed = 0
    for pattern in range(3 ** len(twins.plain.drafters)):
        width = len(twins.plain.drafters) + 1
        own = list(learned.mean[pattern * width : (pattern + 1) * width])
        expected = twins.plain._mixers[temperature == 0][pattern].mean
        assert own == pytest.approx(expected, rel=1e-6, abs=1e-9)
        changed += own != list(fresh._weights[True].mean[pattern * width : (pattern + 1) * width])
    assert changed > 2, "something was learned"


def test_the_end_of_an_answer_is_not_passed(tmp_path: Path) -> None:
    whole = text(random.Random(4), 50)
    for left in (1, 2, 3):
        asked = request(whole, max_tokens=left)
        one, other = (each.propose([asked], [64])[0] for each in Twins("corpus+heads", tmp_path))
        assert list(one.tokens) == list(other.tokens)
        assert (len(one) == 0) == (left == 1)


def test_requests_are_forgotten(tmp_path: Path) -> None:
    drafter = joined("corpus+heads", tmp_path)
    one, two = request([1, 2], id=1), request([9, 2], id=2)
    drafter.propose([one, two], [4, 4])
    drafter.release(one)
    assert drafter._rounds
    assert list(drafter._rounds._lessons) == [2]
    again = request([5, 6, 7], id=1)  # the number of another text now
    fresh = joined("corpus+heads", tmp_path)
    drafts = [each.propose([again], [8])[0] for each in (drafter, fresh)]
    assert list(drafts[0].tokens) == list(drafts[1].tokens)


def test_one_that_has_laws_alone_is_joined_in_python(tmp_path: Path) -> None:
    both = Joined([lookup("suffix:shared=4"), Network()])
    assert both._rounds is None
    assert isinstance(both._calibration, Calibration)
    assert both.propose([request([1, 2, 3, 1, 2, 3, 1, 2])], [8])[0].tokens
