from __future__ import annotations

import pytest

from drafting import make, propose, replay, request
from forerun.drafters import ngram


@pytest.mark.parametrize(
    ("tokens", "proposed"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),  # what followed "1 2"
        ([1, 2, 3, 8, 2, 4, 9, 1, 2], [3, 8, 2, 4]),  # the longer match, though "2" is later
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the later of two
        ([1, 2, 3], []),  # nothing was there before
        ([5], []),
        ([7, 7], [7, 7, 7, 7]),  # goes round
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
    ],
)
def test_it_copies_what_followed(tokens: list[int], proposed: list[int]) -> None:
    draft = propose(make("ngram:max=3,k=4,min_prob=0"), request(tokens))
    assert list(draft.tokens) == proposed
    assert draft.is_chain


def test_matches_shorter_than_min_say_nothing() -> None:
    tokens = [1, 2, 3, 9, 2]
    assert propose(make("ngram:min=1"), request(tokens)).tokens
    assert not propose(make("ngram:min=2"), request(tokens)).tokens
    assert propose(make("ngram:min=2"), request([*tokens, 3])).tokens[0] == 9


def brute_force(tokens: list[int], longest: int, shortest: int, nodes: int) -> list[int]:
    """Prompt lookup by looking everywhere."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                rolled = list(tokens)
                for _ in range(nodes):
                    rolled.append(rolled[end])
                    end += 1
                return rolled[len(tokens) :]
    return []


@pytest.mark.parametrize("step", [1, 3])
def test_the_index_finds_what_a_search_finds(step: int) -> None:
    text = [(i * i * 7 + i // 5) % 6 for i in range(200)]
    drafter = make("ngram:max=4,min=2,k=5,min_prob=0")
    asked = request(text[:1], max_tokens=1000)
    for end in range(1, len(text), step):
        asked.tokens[:] = text[:end]
        assert list(propose(drafter, asked).tokens) == brute_force(text[:end], 4, 2, 5)


def test_each_token_is_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [i % 7 for i in range(60)]
    drafter = make("ngram:max=3,min=1")
    asked = request(text[:50])
    propose(drafter, asked)

    class Counting(dict):  # type: ignore[type-arg]
        written = 0

        def __setitem__(self, key: object, value: object) -> None:
            Counting.written += 1
            super().__setitem__(key, value)

    index = drafter._indexes[0]  # type: ignore[attr-defined]
    index._follows = Counting(index._follows)
    asked.tokens += text[50:52]
    propose(drafter, asked)
    assert Counting.written == 2 * 3


def test_it_keeps_its_limits() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert len(propose(make("ngram:min_prob=0"), request(tokens), budget=3)) == 3
    assert len(propose(make("ngram:min_prob=0"), request(tokens, max_tokens=3))) == 2
    assert propose(make("ngram:min_prob=0"), request(tokens, max_tokens=1)).tokens == ()
    assert propose(make("ngram:min_prob=0"), request(tokens), budget=0).tokens == ()
    assert propose(make("ngram:min_prob=0"), request(tokens, stop=[4])).tokens == [2, 3, 4]
    assert len(propose(make("ngram:min_prob=0.5"), request(tokens))) < 3


def test_longer_matches_are_surer() -> None:
    short = propose(make("ngram:min_prob=0"), request([1, 2, 3, 9, 8, 7, 2]))
    long = propose(make("ngram:min_prob=0"), request([5, 6, 1, 2, 3, 9, 8, 7, 5, 6, 1, 2]))
    assert long.survival[0] > short.survival[0]
    assert ngram._match_length([5, 6, 1, 2, 3, 9, 8, 7, 5, 6, 1, 2], 4) == 4


def test_a_copied_text_is_accepted_whole() -> None:
    text = [i * 37 % 101 for i in range(90)]
    steps = replay(make("ngram"), request(text), text)
    assert len(steps) < 12
    assert sum(right for _, right in steps) + len(steps) >= 90


def test_a_text_that_never_repeats_teaches_it_silence() -> None:
    drafter = make("ngram")
    noise = [2 * i + 1000 for i in range(100)]
    baited = [token for fresh in noise for token in (5, fresh)]  # 5 is followed by ever new tokens
    steps = replay(drafter, request([5, 1], max_tokens=1000), baited)
    assert not any(len(draft) for draft, _ in steps[-20:])
    drafter.release(request([0]))
    assert not drafter._indexes  # type: ignore[attr-defined]
