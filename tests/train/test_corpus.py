from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from forerun.drafters import corpus_file
from forerun.drafters.corpus_file import EMPTY, Corpus, Header, extend, extend_all
from forerun.errors import ConfigError
from forerun.train import corpus
from forerun.train.examples import Example, data_hash
from tiny_corpus import example

VOCAB, ORDER = 4, 3


def texts(count: int = 30, length: int = 25) -> list[Example]:
    """Pseudo-random texts whose tokens depend on the one before; a third is prompt."""
    dice = random.Random(5)
    found = []
    for _ in range(count):
        text = [0]
        while len(text) < length:
            weights = [1 + (text[-1] * 3 + token) % 5 ** (token % 3) for token in range(VOCAB)]
            text += dice.choices(range(VOCAB), weights)
        found.append(example(text, dice.randrange(1, 10)))
    return found


def header(order: int = ORDER, vocab_size: int = VOCAB) -> Header:
    return Header(
        model="m", vocab_size=vocab_size, vocabulary="v", order=order, data="d", counted=1
    )


def literal_law(
    examples: list[Example], ending: tuple[int, ...], estimated: set[int]
) -> dict[int, float]:
    """Interpolated modified Kneser-Ney smoothing, word for word, over the longest context seen
    twice. `estimated` gets the lengths of contexts with data enough to estimate discounts."""
    seen: Counter[tuple[int, ...]] = Counter()  # contexts
    runs: Counter[tuple[int, ...]] = Counter()  # contexts with what followed
    before: dict[tuple[int, ...], set[int | None]] = defaultdict(set)  # and what stood before
    for text in examples:
        for place in np.flatnonzero(text.supervised):
            for n in range(min(ORDER, place) + 1):
                run = tuple(text.tokens[place - n : place + 1])
                seen[run[:-1]] += 1
                runs[run] += 1
                before[run].add(text.tokens[place - n - 1] if place > n else None)
    counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for run, times in runs.items():
        counts[run[:-1]][run[-1]] = times if len(run) > ORDER else len(before[run])

    def law(context: tuple[int, ...]) -> dict[int, float]:
        alike = [c for key in counts if len(key) == len(context) for c in counts[key].values()]
        n1, n2, n3, n4 = (alike.count(c) for c in (1, 2, 3, 4))
        discount = {1: 0.5, 2: 1.0, 3: 1.5}
        if min(n1, n2, n3, n4):
            y = n1 / (n1 + 2 * n2)
            discount = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}
            estimated.add(len(context))
        total = sum(counts[context].values())
        own = {t: (c - discount[min(c, 3)]) / total for t, c in counts[context].items()}
        if not context:
            return own
        left = sum(discount[min(c, 3)] for c in counts[context].values()) / total
        shorter = law(context[1:])
        return {t: own.get(t, 0) + left * shorter.get(t, 0) for t in {*own, *shorter}}

    while ending and seen[ending] < 2:
        ending = ending[1:]
    return law(ending)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "UNLIKELY", 0.0)


@pytest.mark.usefixtures("exact")
def test_laws_are_what_the_literal_formula_says() -> None:
    examples = texts()
    read = Corpus(header(), corpus.build(examples, VOCAB, order=ORDER))
    estimated: set[int] = set()
    for n in range(ORDER + 2):
        for ending in product(range(VOCAB), repeat=n):
            law = read.law(ending)
            expected = literal_law(examples, ending[-ORDER:], estimated)
            assert law == pytest.approx(expected, abs=2e-5)
            assert sum(law.values()) <= 1
    assert estimated == {2, 3}, "both ways to discount are seen"


def test_only_answers_are_counted_and_prompts_are_context() -> None:
    read = Corpus(header(2, 9), corpus.build([example([1, 2, 3, 4, 5], 3)] * 2, 9, order=2))
    assert set(read.law([])) == {4, 5}
    assert max(read.law([2, 3]).items(), key=lambda pair: pair[1])[0] == 4
    with pytest.raises(ConfigError, match="no token of an answer"):
        corpus.build([example([1, 2], 2)], 9)


def test_a_smaller_file_knows_less_and_never_a_context_without_its_shorter_ones(
    tmp_path: Path,
) -> None:
    dice = random.Random(1)
    examples = [example([dice.randrange(60) for _ in range(80)]) for _ in range(150)]
    examples += examples[:75]
    contexts = []
    for size in (6_000, 20_000, 60_000):
        corpus_file.write(
            tmp_path / "c", header(vocab_size=60), corpus.build(examples, 60, size, 3)
        )
        assert (tmp_path / "c").stat().st_size <= size
        read = corpus_file.read(tmp_path / "c")
        contexts.append(read.contexts)
        keys = set(np.asarray(read._keys).tolist())
        for text in examples[:20]:
            for place in range(3, len(text.tokens)):
                key, there = EMPTY, True
                for token in text.tokens[place - 1 : place - 4 : -1]:
                    key = extend(key, token)
                    assert there or key not in keys
                    there = key in keys
    assert contexts[0] < contexts[1] < contexts[2]
    with pytest.raises(ConfigError, match="no corpus fits"):
        corpus.build(examples, 60, 2000)


def test_keys_are_the_same_one_by_one_and_all_at_once() -> None:
    tokens = [0, 1, 49151, 2**20]
    keys = np.array([EMPTY, 1, 2**63, 2**64 - 1], np.uint64)
    expected = [extend(int(key), token) for key, token in zip(keys, tokens, strict=True)]
    assert extend_all(keys, np.array(tokens, np.uint64)).tolist() == expected


def test_the_hash_of_the_data_tells_examples_apart() -> None:
    given = [
        [example([1, 2], 1)],
        [example([1, 2])],
        [example([1, 3], 1)],
        [example([1]), example([2])],
    ]
    assert len({data_hash(examples) for examples in given}) == len(given)
