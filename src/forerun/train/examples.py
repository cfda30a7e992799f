"""What is trained on: conversations as tokens, with a mask of those that the assistant wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, ForerunError
from forerun.models.tokenizer import Tokenizer
from forerun.train.jsonl import read_records
from forerun.train.turns import assistant_spans, prompt_key


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation.

    supervised: per token, whether the assistant wrote it, the end of its turn included.
    prompt: a key of what was asked; answers to the same prompt share it.
    """

    tokens: list[int]
    supervised: list[bool]
    prompt: str


def load(paths: Sequence[str | Path], tokenizer: Tokenizer, max_length: int) -> list[Example]:
    """The conversations of JSONL files, cut to `max_length` tokens.

    A line holds `messages` with assistant turns. Where it also holds `tokens` and `answers`, as
    `forerun data answers` writes them, these are taken; else the chat template makes the tokens.
    Raises `ConfigError` naming the line that cannot be used, one without supervised tokens
    included.
    """
    found = [
        _example(record, tokenizer, max_length, place)
        for path in paths
        for place, record in read_records(Path(path))
    ]
    if not found:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"no conversation in {names or 'no file'}; write one per line")
    return found


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Examples to train on and to hold out; no prompt is in both.

    fraction: of the prompts that are held out, at least one. Which ones depends on the seed and
    the prompts alone, not on their order. Raises `ConfigError` if one side would be empty.
    """
    keys = sorted({example.prompt for example in examples}, key=lambda key: _shuffle(key, seed))
    count = max(1, round(fraction * len(keys)))
    if not 0 < fraction < 1 or count >= len(keys):
        raise ConfigError(
            f"cannot hold out {fraction:g} of {len(keys)} different prompts; "
            "give a fraction between 0 and 1, and more prompts"
        )
    held = set(keys[:count])
    train = [example for example in examples if example.prompt not in held]
    return train, [example for example in examples if example.prompt in held]


def _shuffle(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()


def _example(record: Any, tokenizer: Tokenizer, max_length: int, place: str) -> Example:
    try:
        messages = _messages(record)
        if "tokens" in record:
            tokens, spans = _written(record, tokenizer)
        else:
            turns = sum(message["role"] == "assistant" for message in messages)
            tokens, spans = assistant_spans(tokenizer, messages, _ended(record, turns))
    except ForerunError as error:
        raise ConfigError(f"{place}: {error}") from None
    supervised = [False] * len(tokens)
    for begin, end in spans:
        supervised[begin:end] = [True] * (end - begin)
    if not any(supervised[:max_length]):
        raise ConfigError(
            f"{place}: no token of the assistant among the first {max_length}; leave the line out, "
            "or allow longer examples"
        )
    return Example(tokens[:max_length], supervised[:max_length], prompt_key(messages))


def _messages(record: Any) -> list[dict[str, str]]:
    messages = record.get("messages") if isinstance(record, dict) else None
    good = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not messages or not good:
        raise ConfigError("give 'messages', a list of objects with the texts 'role' and 'content'")
    return list(messages)


def _written(
    record: dict[str, Any], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens and answer spans as the target wrote them, checked."""
    tokens, spans = record["tokens"], record.get("answers")
    size = tokenizer.vocab_size
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ConfigError("'tokens' must be a list of token ids; answer the prompts anew")
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        raise ConfigError(f"token ids lie outside 0 to {size - 1}: another model wrote them")
    good = isinstance(spans, list) and all(
        isinstance(span, list)
        and [type(bound) for bound in span] == [int, int]
        and 0 <= span[0] < span[1] <= len(tokens)
        for span in spans
    )
    if not good:
        raise ConfigError("'answers' must be a list of [begin, end] within 'tokens'")
    return tokens, [(begin, end) for begin, end in record["answers"]]


def _ended(record: dict[str, Any], turns: int) -> list[bool]:
    """Per assistant turn, whether its writer ended it; one that was cut has no end to learn."""
    finish = record.get("finish")
    if finish is None:
        return [True] * turns
    if not isinstance(finish, list) or len(finish) != turns:
        raise ConfigError(f"'finish' must name one reason for each of {turns} assistant turns")
    return [reason != "length" for reason in finish]


def data_hash(examples: Iterable[Example]) -> str:
    """Changes with any token, mask or order."""
    found = hashlib.sha256()
    for example in examples:
        found.update(json.dumps([example.tokens, example.supervised]).encode())
    return found.hexdigest()[:16]
