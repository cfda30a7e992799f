from __future__ import annotations

import random

import pytest

from drafting import make, paths, propose, replay, request


def test_it_branches_where_the_text_did() -> None:
    draft = propose(make("suffix:k=6"), request([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]))
    assert {(3,), (4,), (3, 9), (4, 8)} <= paths(draft)


def test_the_likelier_branch_stands_first() -> None:
    draft = propose(make("suffix"), request([1, 2, 4, 9, 1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2]))
    assert draft.tokens[:2] == [4, 9]
    assert draft.parents[:2] == [-1, 0]
    assert (3,) in paths(draft)


def test_nothing_known_is_nothing_said() -> None:
    assert not propose(make("suffix"), request([1, 2, 3])).tokens
    assert not propose(make("suffix"), request([1])).tokens


def test_it_keeps_its_limits() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    assert len(propose(make("suffix:k=5"), request(tokens))) == 5
    assert len(propose(make("suffix"), request(tokens), budget=3)) == 3
    assert propose(make("suffix"), request(tokens), budget=0).tokens == ()
    assert propose(make("suffix"), request(tokens, max_tokens=4)).tokens == [1, 2, 3]
    assert propose(make("suffix"), request(tokens, max_tokens=1)).tokens == ()
    assert propose(make("suffix"), request(tokens, stop=[3])).tokens == [1, 2, 3]
    survival = propose(make("suffix:min_prob=0.4"), request([1, 2, 3, 9, 1, 2])).survival
    assert survival
    assert min(survival) >= 0.4


def test_a_copied_text_is_accepted_whole() -> None:
    text = [i * 37 % 101 for i in range(90)]
    steps = replay(make("suffix"), request(text), text)
    assert len(steps) < 12


def markov(length: int) -> list[int]:
    """A text whose next token depends on the last two, with a certain one in three cases."""
    dice = random.Random(3)
    text = [0, 1]
    while len(text) < length:
        a, b = text[-2:]
        sure = (a * 5 + b) % 12
        text.append(sure if dice.random() < 0.6 else dice.randrange(12))
    return text


def test_survival_is_honest() -> None:
    """Of the nodes that should survive with a chance of p, about p do."""
    drafter = make("suffix")
    expected = seen = nodes = 0.0
    for id in range(4):
        text = markov(700)
        asked = request(text[:300], id=id, max_tokens=1000)
        for draft, right in replay(drafter, asked, text[300:]):
            nodes += len(draft)
            expected += sum(draft.survival)
            seen += right
        drafter.release(asked)
    assert nodes > 1000
    assert seen == pytest.approx(expected, rel=0.15)


def test_past_outputs_are_learned_only_when_shared() -> None:
    for spec, learned in (("suffix", False), ("suffix:shared=4", True)):
        drafter = make(spec)
        first = request([50, 51], id=1)
        first.tokens += [1, 2, 3, 4, 5]
        propose(drafter, first)
        first.finish_reason = "stop"
        drafter.release(first)
        draft = propose(drafter, request([60, 1, 2], id=2))
        assert (draft.tokens[:2] == [3, 4]) == learned
        # The prompt is not output.
        assert not propose(drafter, request([60, 50], id=3)).tokens


def test_past_outputs_are_not_joined() -> None:
    drafter = make("suffix:shared=8")
    for id, output in enumerate([[1, 2, 3], [4, 5, 6]]):
        done = request([0], id=id)
        done.tokens += output
        done.finish_reason = "stop"
        drafter.release(done)
    assert propose(drafter, request([60, 4], id=5)).tokens
    assert not propose(drafter, request([60, 3], id=6)).tokens


def test_a_request_that_was_put_back_is_not_learned() -> None:
    drafter = make("suffix:shared=4")
    first = request([50, 51], id=1)
    first.tokens += [1, 2, 3, 4, 5]
    drafter.release(first)
    assert not propose(drafter, request([60, 1, 2], id=2)).tokens


def test_old_outputs_are_forgotten() -> None:
    drafter = make("suffix:shared=4")
    for number in range(10):
        done = request([0], id=number)
        done.tokens += [number * 10 + 100, number * 10 + 101, number * 10 + 102]
        done.finish_reason = "length"
        drafter.release(done)
    known = [
        number
        for number in range(10)
        if propose(drafter, request([0, number * 10 + 100], id=20 + number)).tokens
    ]
    assert known[-1] == 9
    assert 2 <= len(known) <= 4


def test_requests_do_not_mix() -> None:
    drafter = make("suffix")
    one, two = request([1, 2, 3, 1], id=1), request([1, 5, 6, 1], id=2)
    drafts = drafter.propose([one, two], [4, 4])
    assert [draft.tokens[0] for draft in drafts] == [2, 5]
    drafter.release(one)
    drafter.laws([two], [4])
    drafter.laws([one], [4])
    drafter.release(one)
    assert list(drafter._tries) == [2]  # type: ignore[attr-defined]
