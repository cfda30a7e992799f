from __future__ import annotations

import random
from collections import Counter

import pytest

from forerun.drafters.counts import END, Trie, TrieMatches, mixture

ORDER = 4


def text(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.choice([0, 0, 1, 1, 2, 3]) for _ in range(length)]


def brute_force(tokens: list[int], ending: list[int]) -> Counter[int]:
    """What followed a run, wherever it stood in the text."""
    size = len(ending)
    return Counter(
        tokens[end]
        for end in range(size, len(tokens))
        if tokens[end - size : end] == ending and tokens[end] != END
    )


def counted(matches: TrieMatches) -> list[Counter[int]]:
    """Per order from 1 on, what followed."""
    return [Counter(dict(matches.followers(order))) for order in range(1, matches.longest + 1)]


@pytest.mark.parametrize("tokens", [text(120), [1] * 30, [1, 2, 3] * 20, list(range(40))])
def test_the_trie_counts_what_followed_each_ending(tokens: list[int]) -> None:
    growing: list[int] = []
    trie = Trie(growing, ORDER)
    for token in tokens:
        growing.append(token)
        trie.update()
        expected = [brute_force(growing, growing[-size:]) for size in range(1, ORDER + 1)]
        assert counted(trie.endings(1.0)) == [counts for counts in expected if counts]


def test_updating_at_once_or_bit_by_bit_is_the_same() -> None:
    tokens = text(100)
    at_once = Trie(tokens, ORDER)
    at_once.update()
    growing: list[int] = []
    bit_by_bit = Trie(growing, ORDER)
    for token in tokens:
        growing.append(token)
        bit_by_bit.update()
    assert counted(at_once.endings(1.0)) == counted(bit_by_bit.endings(1.0))


def test_drafted_endings_are_looked_up() -> None:
    tokens = text(80)
    trie = Trie(tokens, ORDER)
    trie.update()
    for drafted in ([0], [1, 1], [2, 0, 1], [3, 3, 3, 3, 3], [9], [9, 1]):
        matches = trie.endings(1.0)
        for token in drafted:
            matches = matches.advance(token)
        longer = [*tokens, *drafted]
        expected = [brute_force(tokens, longer[-size:]) for size in range(1, ORDER + 1)]
        found = counted(matches)
        assert [counts for counts in found if counts] == [counts for counts in expected if counts]


def test_other_texts_are_matched_and_borders_are_not_crossed() -> None:
    past = [*text(60, seed=1), END, *text(60, seed=2), END]
    trie = Trie(past, ORDER)
    trie.update()
    for seed in range(20):
        other = text(6, seed=seed + 10)
        expected = [brute_force(past, other[-size:]) for size in range(1, ORDER + 1)]
        found = [counts for counts in counted(trie.match(other, 1.0)) if counts]
        assert found == [counts for counts in expected if counts]
        assert all(END not in counts for counts in found)


def test_a_run_that_first_stood_at_the_end_of_a_text_was_followed_by_nothing_there() -> None:
    trie = Trie([1, 2, END, 1, 2, 3, END, 7, 1, 2], ORDER)
    trie.update()
    assert counted(trie.endings(1.0)) == [Counter({3: 1}), Counter({3: 1})]


def nodes(trie: Trie) -> int:
    """How many runs are stored beside the root."""
    found, stack = -1, [trie._root]
    while stack:
        found += 1
        stack += [child for child in stack.pop().values() if not isinstance(child, int)]
    return found


def test_novel_text_makes_no_nodes() -> None:
    trie = Trie(list(range(100)), ORDER)
    trie.update()
    assert nodes(trie) == 0
    trie.tokens += [50, 51]
    trie.update()
    assert nodes(trie) == 3  # 50, 51 and 50 51


class Known:
    """Counts that were written down."""

    def __init__(self, weight: float, *followers: dict[int, int]) -> None:
        self.weight = weight
        self.longest = len(followers)
        self._followers = followers

    def followers(self, order: int) -> list[tuple[int, int]]:
        return list(self._followers[order - 1].items())

    def advance(self, token: int) -> Known:
        return self


def test_the_mixture_is_witten_bell() -> None:
    # Order 2: token 7 once, keeps 1/2. Order 1: 7 three times, 8 once: keeps 4/6 of the rest.
    found = dict(mixture([Known(1.0, {7: 3, 8: 1}, {7: 1})], floor=0.0))
    assert found == pytest.approx({7: 1 / 2 + 1 / 2 * 3 / 6, 8: 1 / 2 * 1 / 6})
    # A weight of 2 makes it 2/3 and 8/10 of the rest.
    found = dict(mixture([Known(2.0, {7: 3, 8: 1}, {7: 1})], floor=0.0))
    assert found == pytest.approx({7: 2 / 3 + 1 / 3 * 6 / 10, 8: 1 / 3 * 2 / 10})


def test_longer_endings_of_any_source_come_first() -> None:
    short, long = Known(1.0, {7: 1}), Known(1.0, {}, {8: 1})
    found = dict(mixture([short, long], floor=0.0))
    assert found == pytest.approx({8: 1 / 2, 7: 1 / 4})
    # Of the same length, the first source.
    found = dict(mixture([Known(1.0, {7: 1}), Known(1.0, {8: 1})], floor=0.0))
    assert found == pytest.approx({7: 1 / 2, 8: 1 / 4})


def test_the_mixture_never_exceeds_one_and_stops_at_the_floor() -> None:
    sources = [Known(1.0, {7: 9, 8: 9, 9: 9}, {7: 9, 8: 1}, {7: 50})]
    assert 0.99 < sum(dict(mixture(sources, 0.0)).values()) < 1
    assert dict(mixture(sources, 0.5)) == pytest.approx({7: 50 / 51})
    assert not dict(mixture([Known(1.0)], 0.0))
