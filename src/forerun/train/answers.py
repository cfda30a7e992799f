"""Answers of a target to prompts: the text that drafters are trained on.

The user's turns of a conversation are answered one after another, each with all that was said
before it. An answer is found again by what was asked and how, and its seed follows from that, so a
run that was killed goes on where it was, and writes what it would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.outputs import Completion
from forerun.errors import ConfigError, PromptError
from forerun.train.jsonl import read_records
from forerun.train.seeds import digest, seed_from
from forerun.train.turns import around, chat_template, closing, end_of_turn

Record: TypeAlias = dict[str, Any]  # one line of the file of answers
Skip: TypeAlias = Callable[["Question", PromptError], None]  # told of prompts that are left out


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation without its answers, and how they are to be sampled."""

    messages: Sequence[dict[str, str]]
    params: SamplingParams

    @property
    def id(self) -> str:
        """Sixteen hex digits of the messages and the parameters."""
        turns = [[message["role"], message["content"]] for message in self.messages]
        return digest(turns, self.params.model_dump(mode="json", exclude_defaults=True))

    def parts(self) -> list[list[dict[str, str]]]:
        """The messages, cut behind each of the user's turns."""
        parts: list[list[dict[str, str]]] = [[]]
        for message in self.messages:
            parts[-1].append(message)
            if message["role"] == "user":
                parts.append([])
        return parts[:-1]

    def seed(self, turn: int) -> int:
        """Of the answer to the user's turn number `turn`."""
        return seed_from("answer", self.id, turn)


def answered(path: Path, model: str) -> set[str]:
    """The ids of the questions that a file holds answers to.

    Raises `ConfigError` when another model has written it.
    """
    found = set()
    for place, record in read_records(path):
        writer = record.get("model") if isinstance(record, dict) else None
        if writer is None or "id" not in record:
            raise ConfigError(f"{place} is no answer of this command; choose another --out")
        if writer != model:
            raise ConfigError(
                f"{path} holds answers of {writer}, not of {model}; choose another --out"
            )
        found.add(record["id"])
    return found


def record_of(
    question: Question, model: str, messages: Sequence[dict[str, str]], finish: Sequence[str]
) -> Record:
    """What is written about a conversation; the tokens come on top where they are known."""
    return {
        "id": question.id,
        "model": model,
        "messages": list(messages),
        "temperature": question.params.temperature,
        "finish": list(finish),
    }


@dataclass(slots=True)
class _Dialogue:
    """A conversation while it is answered."""

    question: Question
    parts: list[list[dict[str, str]]]  # of the question, those not yet asked
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    answer: Completion = field(default_factory=lambda: Completion(0))

    def begin_turn(self, llm: LLM) -> int:
        """Queue the next of the user's turns; the id of its stream. Raises `PromptError`."""
        messages = [*self.messages, *self.parts[0]]
        tokens = self._prompt(llm, messages)
        seed = self.question.seed(len(self.finish))
        params = self.question.params.model_copy(update={"seed": seed})
        (generation,) = llm.engine.add(tokens, params)
        self.parts.pop(0)
        self.messages, self.tokens = messages, tokens
        self.answer = Completion(0)
        return generation.request.id

    def _prompt(self, llm: LLM, messages: list[dict[str, str]]) -> list[int]:
        """All tokens up to where the target goes on. What it wrote stays as it wrote it."""
        if not self.finish:
            return llm.tokenizer.chat(messages)
        template, last = chat_template(llm.tokenizer), len(self.messages) - 1
        rest = around(template, messages, last, asks=True).behind
        tokens = llm.tokenizer.encode(rest, special=False)
        if self.finish[-1] == "stop":  # then the answer holds the end of its turn
            end = end_of_turn(llm.tokenizer, closing(template, messages, last))
            tokens = tokens[len(end) :]
        return [*self.tokens, *tokens]

    def end_turn(self) -> None:
        """Add the answer that has come."""
        assert self.answer.finish_reason
        begin = len(self.tokens)
        self.tokens = [*self.tokens, *self.answer.token_ids]
        self.spans.append((begin, len(self.tokens)))
        self.messages = [*self.messages, {"role": "assistant", "content": self.answer.text}]
        self.finish.append(self.answer.finish_reason)

    def record(self, model: str) -> Record:
        record = record_of(self.question, model, self.messages, self.finish)
        return record | {"tokens": self.tokens, "answers": self.spans}


def answer(
    llm: LLM, questions: Iterable[Question], batch: int, skip: Skip
) -> Iterator[tuple[Record, int]]:
    """Records with the number of tokens written, each as soon as it is whole; `batch` run at once.

    A prompt that the model has no room for is skipped; a conversation that grows too long ends
    before the turn that does not fit. What is running when the iterator is closed is aborted.
    Raises `PromptError` when the model has no chat template.
    """
    chat_template(llm.tokenizer)
    waiting = iter(questions)
    running: dict[int, _Dialogue] = {}  # by the ids of their streams

    def begin(dialogue: _Dialogue) -> bool:
        try:
            running[dialogue.begin_turn(llm)] = dialogue
        except PromptError as error:
            if not dialogue.finish:
                skip(dialogue.question, error)
            return False
        return True

    try:
        while True:
            while len(running) < batch and (question := next(waiting, None)):
                begin(_Dialogue(question, question.parts()))
            if not running:
                return
            for delta in llm.engine.step():
                dialogue = running[delta.request_id]
                dialogue.answer.append(delta)
                if not delta.finish_reason:
                    continue
                del running[delta.request_id]
                dialogue.end_turn()
                if not (dialogue.parts and begin(dialogue)):
                    written = sum(end - start for start, end in dialogue.spans)
                    yield dialogue.record(llm.model.name), written
    finally:
        for stream in running:
            llm.engine.abort(stream)
