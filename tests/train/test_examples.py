"""Conversations as tokens with loss masks: which tokens count, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import tiny
from forerun.errors import ConfigError
from forerun.models import packaged
from forerun.models.tokenizer import Tokenizer
from forerun.train.examples import Example, load, split

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
TURNS = [(USER, "Hi"), (ASSISTANT, "Hello."), (USER, "And?"), (ASSISTANT, "Ünder 👍")]
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }} <|end|>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS = (  # what an older turn thought is left out, as templates of reasoning models do
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = tiny.CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(tiny.tiny_tokenizer(), template)


def conversation(turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def examples(folder: Path, reader: Tokenizer, *records: object, length: int = 999) -> list[Example]:
    return load([write(folder / "data.jsonl", *records)], reader, length)


def supervised(example: Example, reader: Tokenizer) -> list[str]:
    """The texts of the runs of supervised tokens."""
    runs: list[list[int]] = [[]]
    for token, counts in zip(example.tokens, example.supervised, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [reader.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (tiny.CHAT_TEMPLATE, ["Hello.<|end|>", "Ünder 👍<|end|>"]),
        (LLAMA2, ["Hello. <|end|>", "Ünder 👍 <|end|>"]),
        (PLAIN, ["Hello.", "Ünder 👍"]),  # nothing ends a turn
        (FORGETS, ["Hello.<|end|>", "Ünder 👍<|end|>"]),
    ],
)
def test_every_assistant_turn_counts_and_its_end(
    tmp_path: Path, template: str, answers: list[str]
) -> None:
    reader = tokenizer(template)
    (example,) = examples(tmp_path, reader, conversation(TURNS))
    assert supervised(example, reader) == answers
    assert reader.chat_template
    text = reader.chat_template.render(conversation(TURNS)["messages"], asks=False)
    assert reader.decode(example.tokens, skip_special_tokens=False) == text


def test_an_answer_that_stands_elsewhere_too(tmp_path: Path) -> None:
    """Texts are not searched for: the same words in a user's turn do not count."""
    reader = tokenizer()
    turns = [(SYSTEM, "assistant\nyes"), (USER, "<|start|>assistant\nyes"), (ASSISTANT, "yes")]
    (example,) = examples(tmp_path, reader, conversation(turns))
    assert supervised(example, reader) == ["yes<|end|>"]
    assert example.supervised[-4:] == [True] * 4


def test_a_turn_that_was_cut_has_no_end(tmp_path: Path) -> None:
    reader = tokenizer()
    record = conversation(TURNS) | {"finish": ["stop", "length"]}
    (example,) = examples(tmp_path, reader, record)
    assert supervised(example, reader) == ["Hello.<|end|>", "Ünder 👍"]


def test_a_token_that_begins_before_the_answer_does_not_count(tmp_path: Path) -> None:
    """`\\nH` is one token here: the target is never asked to write half of it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate([*letters, "ĊH"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("Ċ", "H")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(tiny.SPECIALS))
    reader = Tokenizer(backend, tiny.CHAT_TEMPLATE)
    (example,) = examples(tmp_path, reader, conversation([(USER, "Hi"), (ASSISTANT, "Hello.")]))
    assert supervised(example, reader) == ["ello.<|end|>"]


def test_what_the_target_wrote_is_taken_as_it_is(tmp_path: Path) -> None:
    record = conversation(TURNS) | {"tokens": [5, 6, 7, 8, 9], "answers": [[1, 2], [3, 5]]}
    (example,) = examples(tmp_path, tokenizer(None), record)
    assert example.tokens == [5, 6, 7, 8, 9]
    assert example.supervised == [False, True, False, True, True]


def test_long_conversations_are_cut(tmp_path: Path) -> None:
    record = conversation(TURNS) | {"tokens": [5, 6, 7, 8, 9], "answers": [[1, 2], [3, 5]]}
    (example,) = examples(tmp_path, tokenizer(), record, length=4)
    assert example.tokens == [5, 6, 7, 8]
    assert example.supervised == [False, True, False, True]
    with pytest.raises(ConfigError, match="line 1: no token of the assistant among the first 1"):
        examples(tmp_path, tokenizer(), record, length=1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (conversation(TURNS[:1]), "no token of the assistant among the first 999"),
        ({"prompt": "Hi"}, "give 'messages'"),
        ({"messages": []}, "give 'messages'"),
        ({"messages": [{"role": USER}]}, "give 'messages'"),
        ([1], "give 'messages'"),
        (conversation(TURNS) | {"finish": ["stop"]}, "one reason for each of 2 assistant turns"),
        (conversation(TURNS) | {"tokens": [1, 2]}, "'answers' must be a list"),
        (conversation(TURNS) | {"tokens": [1], "answers": [[0, 2]]}, "within 'tokens'"),
        (conversation(TURNS) | {"tokens": ["a"], "answers": []}, "'tokens' must be a list"),
        (conversation(TURNS) | {"tokens": [999], "answers": [[0, 1]]}, "another model wrote them"),
        (conversation(TURNS) | {"tokens": [1], "answers": []}, "no token of the assistant"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.jsonl line 2: .*{message}"):
        examples(tmp_path, tokenizer(), conversation(TURNS), record)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    reader = tokenizer()
    with pytest.raises(ConfigError, match="cannot read"):
        load([tmp_path / "none.jsonl"], reader, 99)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="no conversation in"):
        load([tmp_path / "blank.jsonl"], reader, 99)
    (tmp_path / "torn.jsonl").write_text('\n{"messages": [')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        load([tmp_path / "torn.jsonl"], reader, 99)
    with pytest.raises(ConfigError, match="no chat template"):
        examples(tmp_path, tokenizer(None), conversation(TURNS))


def test_prompts_are_not_split() -> None:
    """Answers to one prompt lie on one side, whatever the order of the lines."""
    made = [Example([place], [True], f"prompt {place % 10}") for place in range(40)]
    train, held = split(made, 0.2, seed=1)
    assert {e.prompt for e in train}.isdisjoint(e.prompt for e in held)
    assert (len(train), len(held)) == (32, 8)
    again = split(made[::-1], 0.2, seed=1)
    assert [sorted(e.tokens for e in side) for side in again] == [
        sorted(e.tokens for e in side) for side in (train, held)
    ]
    others = {tuple(sorted({e.prompt for e in split(made, 0.2, seed)[1]})) for seed in range(9)}
    assert len(others) > 1
    for few, fraction in ((made[:1], 0.5), (made, 1.0), (made, 0.0)):
        with pytest.raises(ConfigError, match="cannot hold out"):
            split(few, fraction, seed=0)


def test_prompts_are_what_was_asked_first(tmp_path: Path) -> None:
    reader = tokenizer()
    other = [*TURNS[:1], (ASSISTANT, "Oh"), *TURNS[2:]]
    elsewhere = [(USER, "Ho"), *TURNS[1:]]
    one, two, three = examples(tmp_path, reader, *map(conversation, (TURNS, other, elsewhere)))
    assert one.prompt == two.prompt != three.prompt


@pytest.mark.real
def test_a_real_template(tmp_path: Path) -> None:
    from forerun.models.gguf_file import GGUFFile
    from forerun.models.tokenizer import gguf_tokenizer

    path = packaged.path("smollm2-135m")
    assert path
    reader = gguf_tokenizer(GGUFFile(path))
    (example,) = examples(tmp_path, reader, conversation(TURNS))
    assert supervised(example, reader) == ["Hello.<|im_end|>", "Ünder 👍<|im_end|>"]
    asked, first = (reader.chat(conversation(TURNS[:count])["messages"]) for count in (3, 1))
    assert example.tokens[: len(asked)] == asked
    assert example.supervised.index(True) == len(first)
