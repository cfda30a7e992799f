from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import pytest

from drafting import check, make, paths, propose, replay, request
from forerun.core import Draft, Request
from forerun.drafters import Drafter, joined
from forerun.drafters.calibration import Calibration
from forerun.drafters.joined import Joined
from forerun.drafters.laws import SILENT, Law

Known = Callable[[tuple[int, ...]], Mapping[int, float]]  # all tokens up to a place -> its law


class Knows(Drafter):
    """Believes what a function says."""

    def __init__(self, name: str, known: Known, nodes: int = 16, depth: int = 8) -> None:
        self.name = name  # type: ignore[misc]
        self.known, self.nodes, self.depth = known, nodes, depth

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        raise AssertionError("laws are asked for")

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        return [self._law(tuple(request.tokens)) for request in requests]

    def _law(self, tokens: tuple[int, ...]) -> Law:
        return Law(
            tokens,
            lambda path: self.known(path).items(),
            lambda path, token: (*path, token),
            self.nodes,
            self.depth,
        )


class Mute(Knows):
    """Has nothing to say."""

    def __init__(self) -> None:
        super().__init__("mute", lambda path: {})

    def _law(self, tokens: tuple[int, ...]) -> Law:
        return SILENT


def table(seed: int, vocab: int = 4, share: float = 0.9, named: int = 3) -> Known:
    """Random laws of the last two tokens: `named` of `vocab` tokens, `share` of the probability."""

    @cache
    def law(ending: tuple[int, ...]) -> dict[int, float]:
        dice = random.Random(f"{seed} {ending}")
        weights = {token: dice.random() ** 2 for token in dice.sample(range(vocab), named)}
        total = sum(weights.values())
        return {token: share * weight / total for token, weight in weights.items()}

    return lambda path: law(path[-2:])


def only(token: int, belief: float) -> Known:
    return lambda path: {token: belief}


# ---- one tree -----------------------------------------------------------------------------------


def test_what_both_name_is_one_node() -> None:
    both = Joined([Knows("a", only(1, 0.6), depth=2), Knows("b", only(1, 0.5), depth=1)])
    draft = propose(both, request([0]))
    assert list(draft.tokens) == [1, 1]
    assert list(draft.parents) == [-1, 0]
    assert list(draft.sources) == ["a+b", "a"]


def test_each_node_says_who_named_it() -> None:
    both = Joined([Knows("a", lambda _: {1: 0.3, 2: 0.2}, depth=1), Knows("b", only(2, 0.5))])
    draft = propose(both, request([0]), budget=2)
    named = {path: draft.sources[n] for n, path in enumerate(_each_path(draft))}
    assert named[(2,)] == "a+b"
    assert propose(both, request([0]), budget=0).tokens == ()


@pytest.mark.parametrize("nodes", [1, 5, 12, 30])
@pytest.mark.parametrize("lessons", [0, 60])
def test_the_tree_holds_the_likeliest_paths(
    monkeypatch: pytest.MonkeyPatch, nodes: int, lessons: int
) -> None:
    """No other tree of its size has likelier nodes: all paths are listed and compared."""
    depth, vocab = 3, 4
    sources = [Knows(str(i), table(i), nodes=99, depth=depth) for i in range(2)]
    both = Joined(sources)
    monkeypatch.setattr(joined, "NEGLIGIBLE", 0.0)
    replay(both, request([0, 1], id=9, max_tokens=999), [i * i % vocab for i in range(lessons)])
    both._calibration = Calibration()  # which would reorder what the weights say
    asked = request([2, 3])
    # With room for all of them, every path comes with its chance.
    everything = propose(both, asked, budget=vocab + vocab**2 + vocab**3)
    chances = dict(zip(_each_path(everything), everything.survival, strict=True))
    assert set(chances) == {
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(vocab), repeat=length)
        if all(_named(sources, (2, 3, *path[:i]), path[i]) for i in range(length))
    }
    draft = propose(both, asked, budget=nodes)
    best = sorted(chances.values(), reverse=True)[:nodes]
    assert sorted(draft.survival, reverse=True) == pytest.approx(best)
    assert all(
        chance == pytest.approx(chances[path])
        for path, chance in zip(_each_path(draft), draft.survival, strict=True)
    )


def test_children_never_sum_up_to_more_than_their_parent() -> None:
    sure = [Knows(str(token), only(token, 0.95)) for token in range(3)]
    draft = propose(Joined(sure), request([0]))
    for node in range(-1, len(draft)):
        each = zip(draft.survival, draft.parents, strict=True)
        below = [chance for chance, parent in each if parent == node]
        assert sum(below) <= (draft.survival[node] if node >= 0 else 1.0) + 1e-9


def test_it_keeps_the_limits_of_its_sources() -> None:
    both = Joined([Knows("a", only(1, 0.9), nodes=3, depth=2), Knows("b", only(2, 0.9), 4, 3)])
    draft = propose(both, request([0]))
    assert len(draft) == 7
    found = paths(draft)
    assert max(map(len, found)) == 3
    assert all(path[2] == 2 for path in found if len(path) == 3), "the first does not see so far"
    assert max(map(len, paths(propose(both, request([0], max_tokens=2))))) == 1
    stopped = paths(propose(both, request([0], stop=[2])))
    assert all(2 not in path[:-1] for path in stopped)


# ---- what is learned ----------------------------------------------------------------------------


def text(known: Known, length: int, vocab: int, seed: int) -> list[int]:
    """Drawn from a law; what it does not name is drawn evenly."""
    dice = random.Random(seed)
    tokens = [0, 1]
    while len(tokens) < length:
        law = known(tuple(tokens))
        rest = 1 - sum(law.values())
        weights = [law.get(token, 0.0) + rest / vocab for token in range(vocab)]
        tokens += dice.choices(range(vocab), weights)
    return tokens


def blurred(known: Known, seed: int, vocab: int) -> Known:
    """Half of a law of two tokens, half of another."""
    other = table(seed, vocab)

    @cache
    def law(ending: tuple[int, ...]) -> dict[int, float]:
        one, two = known(ending), other(ending)
        return {t: 0.5 * one.get(t, 0.0) + 0.5 * two.get(t, 0.0) for t in {*one, *two}}

    return lambda path: law(path[-2:])


def decode(drafter: Drafter, known: Known, vocab: int, length: int = 1500) -> tuple[float, float]:
    """Right tokens per step, and how many were expected."""
    right = expected = steps = 0.0
    for id in range(2):
        tokens = text(known, length, vocab, id)
        asked = request(tokens[:2], id=id, max_tokens=length)
        for draft, hits in replay(drafter, asked, tokens[2:]):
            right += hits
            expected += sum(draft.survival)
            steps += 1
    return right / steps, expected / steps


def test_survival_is_honest() -> None:
    """Of the nodes that should survive with a chance of p, about p do."""
    known = table(5, vocab=8)
    both = Joined([Knows(str(i), blurred(known, i, 8)) for i in range(2)])
    right, expected = decode(both, known, 8)
    assert right > 1
    assert right == pytest.approx(expected, rel=0.1)


def test_two_half_truths_are_worth_more_than_one() -> None:
    known = table(5, vocab=8)
    sources = [blurred(known, i, 8) for i in range(2)]
    alone = max(
        decode(Joined([Knows("one", source, nodes=8), Mute()]), known, 8)[0] for source in sources
    )
    both = Joined([Knows(str(i), source, nodes=4) for i, source in enumerate(sources)])
    assert decode(both, known, 8)[0] > 1.05 * alone


def test_a_silent_partner_changes_nothing() -> None:
    known = table(5, vocab=8)
    alone, _ = decode(make("suffix"), known, 8)
    assert decode(Joined([make("suffix"), Mute()]), known, 8)[0] > 0.99 * alone
    assert decode(Joined([Mute(), make("suffix")]), known, 8)[0] > 0.99 * alone


def wrong(known: Known, vocab: int) -> Known:
    """Sure of the token that is least likely."""
    return lambda path: {min(range(vocab), key=lambda token: known(path).get(token, 0.0)): 0.9}


def test_a_liar_is_found_out() -> None:
    known = table(5, vocab=8)
    few = 8  # nodes, so that a bad one takes the place of a good one
    alone = decode(Joined([Knows("a", known, nodes=few), Mute()]), known, 8)[0]
    liar = Joined([Knows("a", known, nodes=few), Knows("liar", wrong(known, 8), nodes=0)])
    assert decode(liar, known, 8)[0] > 0.97 * alone
    learned = propose(liar, request([0, 1], id=5))
    fresh = propose(
        Joined([Knows("a", known, nodes=few), Knows("liar", wrong(known, 8), nodes=0)]),
        request([0, 1], id=5),
    )
    assert "liar" in fresh.sources, "the control: nothing is known of it yet"
    assert "liar" not in learned.sources


def test_requests_are_forgotten() -> None:
    both = Joined([Knows("a", only(1, 0.5)), Mute()])
    asked = request([0])
    propose(both, asked)
    both.release(asked)
    assert not both._open


def test_networks_may_be_left_out() -> None:
    """Those without a network are always asked, each network alone with them, or all."""
    sources = [Knows(name, only(token, 0.5), depth=1) for token, name in enumerate("abcd")]
    sources[1].runs_network = sources[3].runs_network = False
    both = Joined(sources)
    named = [set(way.propose([request([9])], [8])[0].sources) for way in both.ways]
    assert named == [{"b", "d"}, {"a", "b", "d"}, {"b", "c", "d"}, {"a", "b", "c", "d"}]
    assert [way.members for way in Joined(sources[1::2]).ways] == [[0, 1]]
    assert [way.members for way in Joined(sources[::2]).ways] == [[0], [1], [0, 1]]
    assert [way.members for way in Joined(sources[:2]).ways] == [[1], [0, 1]]


def test_one_alone_proposes_by_itself() -> None:
    both = Joined([make("suffix"), Knows("network", only(3, 0.9))])
    asked = request([1, 2, 1, 2, 1])
    (draft,) = both.ways[0].propose([asked], [4])
    assert not draft.sources
    assert both.ways[0].name == "suffix"
    assert list(draft.tokens) == list(propose(make("suffix"), asked, 4).tokens)


def test_the_rule_decides_who_joins() -> None:
    assert isinstance(make("ngram+suffix"), Joined)
    assert not isinstance(make("ngram+suffix", independent_noise=True), Joined)


def _each_path(draft: Draft) -> list[tuple[int, ...]]:
    check(draft)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def _named(sources: Sequence[Knows], path: tuple[int, ...], token: int) -> bool:
    return any(token in source.known(path) for source in sources)
