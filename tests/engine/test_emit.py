"""Text as it becomes certain, and where an output ends."""

from __future__ import annotations

import itertools

import pytest

from forerun.core import Request, SamplingParams
from forerun.engine.emit import Generation, find_stop, possible_stop
from forerun.engine.outputs import Delta
from forerun.models.tokenizer import Tokenizer
from tiny import END, tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer())


def emit(text: bytes | list[int], sizes: list[int], **values: object) -> list[Delta]:
    """Emit tokens in steps of the given sizes until they or the output end."""
    params = SamplingParams(**{"max_tokens": 100, **values})
    request = Request(0, [1], 1, params, seed=0, stop_ids=frozenset([END]))
    generation = Generation(request, 0, TOKENIZER.stream(params.skip_special_tokens))
    tokens = iter(text)
    deltas = []
    for size in sizes:
        new = list(itertools.islice(tokens, size))
        if not new or request.finish_reason:
            break
        request.tokens += new
        deltas.append(generation.emit(len(new), [""] * len(new), None))
    return deltas


def summary(deltas: list[Delta]) -> tuple[str, int, str | None]:
    text = "".join(delta.text for delta in deltas)
    return text, sum(len(delta.token_ids) for delta in deltas), deltas[-1].finish_reason


STEPS = [[1] * 99, [2] * 50, [3] * 33, [5, 1, 7, 2] * 10, [99]]


@pytest.mark.parametrize("sizes", STEPS)
@pytest.mark.parametrize(
    ("tokens", "values", "expected"),
    [
        (b"one two three four", {"stop": "three"}, ("one two ", 13, "stop")),
        (
            b"one two three four",
            {"stop": "three", "include_stop_str_in_output": True},
            ("one two three", 13, "stop"),
        ),
        (b"one two three four", {"stop": ["four", "w"]}, ("one t", 6, "stop")),
        (b"abcabd!", {"stop": "abd"}, ("abc", 6, "stop")),
        (b"one two", {"stop": "x", "max_tokens": 5}, ("one t", 5, "length")),
        (b"one two", {"stop": "two", "max_tokens": 7}, ("one ", 7, "stop")),
        (b"one two", {"stop": "one", "min_tokens": 4}, ("one tw", 7, None)),
        (b"one one two", {"stop": "one", "min_tokens": 4}, ("one ", 7, "stop")),
        (b"one", {"stop": "one", "min_tokens": 3}, ("", 3, "stop")),
        ([*b"one", END, *b"two"], {}, ("one", 4, "stop")),
        ([*b"one", END, *b"two"], {"max_tokens": 4}, ("one", 4, "stop")),
        (
            [*b"one", END, *b"two"],
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            ("one<|end|>", 4, "stop"),
        ),
        ([*b"one", END], {"stop": "eleven"}, ("one", 4, "stop")),
        ("naïve 日本".encode(), {"max_tokens": 13}, ("naïve 日本", 13, "length")),
        ("日本".encode(), {"max_tokens": 5}, ("日\ufffd", 5, "length")),
        ("x日本y".encode(), {"stop": "本"}, ("x日", 7, "stop")),
    ],
)
def test_the_output_ends_at_the_same_token_whatever_the_steps(
    tokens: bytes | list[int],
    values: dict[str, object],
    expected: tuple[str, int, str | None],
    sizes: list[int],
) -> None:
    assert summary(emit(tokens, sizes, **values)) == expected


def test_text_is_held_back_while_it_could_become_a_stop_string() -> None:
    deltas = emit(b"a thr! three", [1] * 20, stop="three")
    assert [delta.text for delta in deltas] == ["a", " ", "", "", "", "thr!", " ", *[""] * 5]


def test_characters_are_given_whole() -> None:
    deltas = emit("é日".encode(), [1] * 5)
    assert [delta.text for delta in deltas] == ["", "é", "", "", "日"]


def test_tokens_behind_the_end_are_forgotten() -> None:
    request = Request(0, [1], 1, SamplingParams(max_tokens=9), 0, frozenset([END]))
    generation = Generation(request, 0, TOKENIZER.stream())
    request.tokens += [65, END, 66, 67]
    delta = generation.emit(4, ["a", "b", "c", ""], None)
    assert (delta.token_ids, delta.sources) == ([65, END], ["a", "b"])
    assert request.output == [65, END]


def test_the_stop_string_that_ends_first_counts() -> None:
    assert find_stop("xabcy", ["abcy", "bc"], include=False) == 2
    assert find_stop("xabcy", ["abc", "bc"], include=False) == 1
    assert find_stop("xabcy", ["z"], include=False) is None


def test_what_could_become_a_stop_string() -> None:
    assert possible_stop("xaba", ["abab"]) == 1
    assert possible_stop("xab", ["b"]) == 3
    assert possible_stop("", ["b"]) == 0
