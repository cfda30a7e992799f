"""Answers of a target: the tokens it wrote, turn by turn, and going on after a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

import tiny
from fakes import FakeTarget
from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.errors import ConfigError, PromptError
from forerun.models.hub import LoadedModel
from forerun.models.tokenizer import Tokenizer
from forerun.train.answers import Question, Record, answer, answered
from forerun.train.examples import load
from forerun.train.jsonl import Journal, read_records

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, seed=0)


def talk(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


QUESTIONS = [
    Question(talk("Hi"), PARAMS),
    Question(talk("One", "Two", "Three"), PARAMS),
    Question([{"role": "system", "content": "Be brief."}, *talk("Why?", "So?")], PARAMS),
    *(Question(talk(f"Number {number}"), PARAMS) for number in range(5)),
]


def letters(path: tuple[int, ...]) -> torch.Tensor:
    """A law over letters, and the end of a turn, that depends on the tokens before."""
    noise = torch.Generator().manual_seed(hash(path[-3:]) & 0xFFFFFFFF)
    logits = torch.full((tiny.VOCAB,), -100.0)
    logits[ord("a") : ord("z") + 1] = torch.randn(26, generator=noise)
    logits[tiny.END] = 1.0
    return logits


def fake_llm(template: str | None = tiny.CHAT_TEMPLATE, max_length: int = 512) -> LLM:
    tokenizer = Tokenizer(tiny.tiny_tokenizer(), template)
    target = FakeTarget(letters, max_length)
    return LLM(LoadedModel("fake", target, tokenizer, frozenset([tiny.END])), max_num_seqs=8)


@pytest.fixture
def llm() -> LLM:
    return fake_llm()


def refuse(question: Question, error: PromptError) -> None:
    raise error


def records(llm: LLM, batch: int = 4) -> dict[str, Record]:
    return {record["id"]: record for record, _ in answer(llm, QUESTIONS, batch, refuse)}


def test_every_turn_is_answered_with_all_before_it(llm: LLM) -> None:
    """Each answer is what the engine gives alone for the tokens in front of it."""
    found = records(llm)
    assert len(found) == len(QUESTIONS)
    for question in QUESTIONS:
        record = found[question.id]
        messages = record["messages"]
        roles = [message["role"] for message in messages]
        turns = roles.count("user")
        assert roles[-2 * turns :] == ["user", "assistant"] * turns
        assert [m for m in messages if m["role"] != "assistant"] == question.messages
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        ends = zip(record["answers"], record["finish"], said, strict=True)
        for turn, ((begin, end), finish, text) in enumerate(ends):
            params = PARAMS.model_copy(update={"seed": question.seed(turn)})
            (alone,) = llm.generate([record["tokens"][:begin]], params)
            assert record["tokens"][begin:end] == alone.outputs[0].token_ids
            assert (finish, text) == (alone.outputs[0].finish_reason, alone.outputs[0].text)
    reasons = {reason for record in found.values() for reason in record["finish"]}
    assert reasons == {"stop", "length"}, "both ends of a turn are tried"


@pytest.mark.parametrize("end", ["<|end|>", "<|end|>\n"])
def test_the_tokens_are_those_of_the_chat_template(end: str) -> None:
    """Also behind turns that were cut, whose end the template has to write."""
    llm = fake_llm(tiny.CHAT_TEMPLATE.replace("<|end|>", end))
    assert llm.tokenizer.chat_template
    for record in records(llm).values():
        text = llm.tokenizer.chat_template.render(record["messages"], asks=False)
        rest = end if record["finish"][-1] == "length" else end.removeprefix("<|end|>")
        assert record["tokens"] == llm.tokenizer.encode(text.removesuffix(rest), special=False)


def test_any_batch_gives_the_same(llm: LLM) -> None:
    assert records(llm, batch=1) == records(llm, batch=4) == records(llm, batch=8)


def test_what_is_asked_and_how_makes_the_text(llm: LLM) -> None:
    same, hotter, longer, other, seeded = (
        Question(talk("Hi"), PARAMS),
        Question(talk("Hi"), PARAMS.model_copy(update={"temperature": 1.1})),
        Question(talk("Hi"), PARAMS.model_copy(update={"max_tokens": 13})),
        Question(talk("Hi", "Hi"), PARAMS),
        Question(talk("Hi"), PARAMS.model_copy(update={"seed": 1})),
    )
    assert same.id == QUESTIONS[0].id
    assert len({q.id for q in (same, hotter, longer, other, seeded)}) == 5
    assert len({other.seed(0), other.seed(1), same.seed(0)}) == 3


def test_the_queue_is_short_and_nothing_is_left(llm: LLM) -> None:
    asked = []

    def endless():  # type: ignore[no-untyped-def]
        for number in range(1000):
            asked.append(number)
            yield Question(talk(str(number)), PARAMS)

    stream = answer(llm, endless(), 4, refuse)
    assert len(list(islice(stream, 3))) == 3
    assert len(asked) <= 3 + 4
    stream.close()
    assert not llm.engine.busy


def test_what_the_model_has_no_room_for() -> None:
    llm = fake_llm(max_length=80)
    long = Question(talk("x" * 100), PARAMS)
    growing = Question(talk("x" * 20, "y" * 20, "z"), PARAMS)
    skipped = []
    found = list(answer(llm, [long, growing], 4, lambda q, error: skipped.append((q, error))))
    assert [q for q, _ in skipped] == [long]
    (record, tokens) = found[0]
    assert len(found) == 1
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
    assert tokens == record["answers"][0][1] - record["answers"][0][0]
    with pytest.raises(PromptError, match="no chat template"):
        list(answer(fake_llm(None), [growing], 4, refuse))


def test_examples_are_read_back(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with Journal(path) as journal:
        for record, _ in answer(llm, QUESTIONS, 4, refuse):
            journal.append(record)
    found = {record["id"]: record for _, record in read_records(path)}
    examples = load([path], llm.tokenizer, 512)
    assert len({example.prompt for example in examples}) == len(QUESTIONS)
    for example, record in zip(examples, found.values(), strict=True):
        assert example.tokens == record["tokens"]
        spans = [range(*span) for span in record["answers"]]
        inside = [any(place in span for span in spans) for place in range(len(example.tokens))]
        assert example.supervised == inside
        # tokens made of the messages alone have the same mask
        bare = tmp_path / "bare.jsonl"
        with Journal(bare) as journal:
            journal.append({"messages": record["messages"], "finish": record["finish"]})
        (again,) = load([bare], llm.tokenizer, 512)
        assert again.supervised[: len(inside)] == inside
        assert again.tokens[: len(inside)] == example.tokens
        assert not any(again.supervised[len(inside) :])
        bare.unlink()


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "a", "model": "m"}\n{"id": "b", "model": "m"}\n')
    assert answered(path, "m") == {"a", "b"}
    with pytest.raises(ConfigError, match="holds answers of m, not of n"):
        answered(path, "n")
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="line 1 is no answer of this command"):
        answered(path, "m")


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle, torn line at the end: the same lines as without, in some order."""
    model = tiny.tiny_folder(tmp_path / "model", layers=1)
    prompts = tmp_path / "prompts.jsonl"
    with Journal(prompts) as journal:
        for number in range(150):
            journal.append({"turns": [f"Number {number}", "And?"]})

    def command(out: Path) -> list[str]:
        arguments = ["data", "answers", str(prompts), "--out", str(out), "--model", str(model)]
        options = ["--temperature", "0", "--temperature", "1", "--max-tokens", "10"]
        return [sys.executable, "-m", "forerun", *arguments, *options, "--batch", "7"]

    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    subprocess.run(command(whole), check=True, capture_output=True)
    process = subprocess.Popen(command(killed), stderr=subprocess.DEVNULL)
    while not killed.exists() or killed.read_bytes().count(b"\n") < 20:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = killed.read_bytes().count(b"\n")
    assert 20 <= lines < 300, "it was killed in the middle"
    torn = killed.read_bytes().rstrip(b"\n")
    killed.write_bytes(torn[: len(torn) - random.Random(0).randrange(1, 40)])
    done = subprocess.run(command(killed), check=True, capture_output=True, text=True)
    assert "answers 300/300" in done.stderr
    assert sorted(killed.read_text().split("\n")) == sorted(whole.read_text().split("\n"))
    again = subprocess.run(command(killed), check=True, capture_output=True, text=True)
    assert "answers 300/300" in again.stderr
    assert len(killed.read_text().split("\n")) == 301
