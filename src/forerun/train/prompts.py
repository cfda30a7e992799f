"""The user's own prompts: many forms in, one form out.

A prompt is a conversation without its answers: `messages` with the user's turns, perhaps behind a
system turn. Answers that stood between them are left out, since the target will give its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from forerun.errors import ConfigError
from forerun.train.filters import normalised
from forerun.train.jsonl import read_lines

Conversation: TypeAlias = list[dict[str, str]]
KEYS = ("messages", "prompt", "turns")  # one of them holds the prompt
ROLES = ("system", "user", "assistant")


def read_prompts(path: Path) -> Iterator[Conversation]:
    """The prompts of a file or of a folder that `datasets` has saved.

    A file is JSONL with `messages`, `prompt` or `turns` in every line, or plain text with one
    prompt per line; one that ends in .jsonl or begins with `{` is JSONL. A folder has one of these
    as a column. Raises `ConfigError` naming what cannot be used.
    """
    records = _dataset(path) if path.is_dir() else _file(path)
    for place, record in records:
        try:
            yield _conversation(record)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None


def has_text(messages: Conversation) -> bool:
    """Whether a user asks something, and never nothing."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return bool(asked) and all(asked)


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    is_json: bool | None = True if path.suffix == ".jsonl" else None
    for place, line in read_lines(path):
        if is_json is None:
            is_json = line.startswith("{")
        try:
            yield place, json.loads(line) if is_json else {"prompt": line}
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place} is not JSON: {error.msg}; mend it") from None


def _dataset(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ConfigError(
            f"{folder} is a folder, which takes the package 'datasets' to read; "
            "pip install datasets, or give a JSONL file"
        ) from None
    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"{folder} is no folder that save_to_disk has made ({error}); give one, or a file"
        ) from None
    splits = found if isinstance(found, Mapping) else {"row": found}
    for name, split in splits.items():
        for number, row in enumerate(split, start=1):
            yield f"{folder} {name} {number}", row


def _conversation(record: Any) -> Conversation:
    key = (
        next((key for key in KEYS if key in record), None) if isinstance(record, Mapping) else None
    )
    if key is None:
        raise ConfigError(f"no prompt in it; give an object with one of: {', '.join(KEYS)}")
    value = record[key]
    if key == "messages":
        return _asked(value)
    turns = value if key == "turns" else [value]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"'{key}' must hold {'a list of texts' if key == 'turns' else 'a text'}")
    return [{"role": "user", "content": normalised(turn)} for turn in turns]


def _asked(messages: Any) -> Conversation:
    """The messages without what an assistant said."""
    fields = ("role", "content")
    good = isinstance(messages, Iterable) and all(
        isinstance(message, Mapping) and all(isinstance(message.get(f), str) for f in fields)
        for message in messages
    )
    if not good:
        raise ConfigError("'messages' must be a list of objects with the texts 'role', 'content'")
    if unknown := {message["role"] for message in messages}.difference(ROLES):
        raise ConfigError(f"the role '{min(unknown)}' is unknown; use {', '.join(ROLES)}")
    return [
        {"role": message["role"], "content": normalised(message["content"])}
        for message in messages
        if message["role"] != "assistant"
    ]
