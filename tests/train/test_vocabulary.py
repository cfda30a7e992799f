from __future__ import annotations

import pytest
import torch

from forerun.errors import ConfigError
from forerun.train.examples import Example
from forerun.train.vocabulary import choose, count, full

TEXTS = [
    Example([7, 7, 3, 3, 3, 9], [False, False, True, True, True, True], "a"),
    Example([9, 2, 5], [True, True, False], "b"),
]


def test_tokens_of_the_assistant_are_counted() -> None:
    counts_V = count(TEXTS, 12)
    assert {token: int(n) for token, n in enumerate(counts_V) if n} == {3: 3, 9: 2, 2: 1}


def test_the_most_frequent_are_kept_and_special_ones_whatever_they_count() -> None:
    found = choose(count(TEXTS, 12), 3, always=[11])
    assert found.ids_U.tolist() == [3, 9, 11]
    assert found.coverage == pytest.approx(5 / 6)
    assert found.reduced
    assert (found.d2t_U + torch.arange(3)).tolist() == [3, 9, 11]
    known = found.lookup().tolist()
    assert [known[token] for token in (3, 9, 11, 2)] == [0, 1, 2, -1]


def test_a_large_one_is_the_whole() -> None:
    found = choose(count(TEXTS, 12), 50)
    assert not found.reduced
    assert found.ids_U.tolist() == full(12).ids_U.tolist() == list(range(12))


def test_no_room_for_the_special_ones_is_said() -> None:
    with pytest.raises(ConfigError, match="no room for the 2 special tokens"):
        choose(count(TEXTS, 12), 1, always=[1, 2])
