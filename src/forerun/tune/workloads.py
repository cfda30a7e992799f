"""What is measured: the built-in prompts, or the user's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

BUILT_IN = ("chat", "code", "code-edit", "summarise", "math", "qa-context", "translate")
MIX = "mix"
MIX_PLACES = (0, 4, 8)  # which prompts of each built-in workload `mix` takes
KEYS = ("messages", "prompt", "turns")  # one of them holds the prompt in a line of JSON

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation up to the answer that is wanted. `cut`: later turns were left out."""

    id: str
    messages: tuple[Message, ...]
    cut: bool = False

    def encode(self, tokenizer: Tokenizer, raw: bool = False) -> list[int]:
        """Token ids: by the chat template if there is one and not `raw`, else the bare text."""
        if tokenizer.has_chat_template and not raw:
            return tokenizer.chat(list(self.messages))
        return tokenizer.encode("\n\n".join(message["content"] for message in self.messages))


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts with a name."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with any word of any prompt, or with their order."""
        text = json.dumps([prompt.messages for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def first(self, count: int | None) -> Workload:
        """The same workload with `count` prompts at most; None keeps all."""
        return replace(self, prompts=self.prompts[:count])


def load_workload(name: str) -> Workload:
    """A built-in workload by name, or a file of prompts.

    A file is JSONL with `messages`, `prompt` or `turns` (whose first turn is used) in every line,
    or plain text with one prompt per line; one that ends in .jsonl or starts with `{` is JSONL.
    Raises `ConfigError` for an unknown name, an empty file, and lines that cannot be used.
    """
    if name == MIX:
        return _mix()
    if name in BUILT_IN:
        return _built_in(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"no workload and no file is called '{name}'; "
            f"give a file or one of: {', '.join([*BUILT_IN, MIX])}"
        )
    return _from_file(path)


def _built_in(name: str) -> Workload:
    text = (files("forerun.tune") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return Workload(name, tuple(_from_json_lines(text, name)))


def _mix() -> Workload:
    """Some of each, in turn, so that the first few prompts are a mix already."""
    sources = [_built_in(name) for name in BUILT_IN]
    prompts = [source.prompts[place] for place in MIX_PLACES for source in sources]
    return Workload(MIX, tuple(prompts))


def _from_file(path: Path) -> Workload:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give UTF-8 text or JSONL") from None
    is_json = path.suffix == ".jsonl" or text.lstrip().startswith("{")
    prompts = tuple(_from_json_lines(text, str(path)) if is_json else _from_plain_lines(text))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; write one per line")
    return Workload(path.stem, prompts)


def _from_plain_lines(text: str) -> Iterator[Prompt]:
    for number, line in _filled_lines(text):
        yield Prompt(str(number), ({"role": "user", "content": line},))


def _from_json_lines(text: str, source: str) -> Iterator[Prompt]:
    for number, line in _filled_lines(text):
        try:
            yield _from_record(json.loads(line), number)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} line {number} is not JSON: {error.msg}") from None
        except ConfigError as error:
            raise ConfigError(f"{source} line {number}: {error}") from None


def _from_record(record: Any, number: int) -> Prompt:
    key = next((key for key in KEYS if key in record), None) if isinstance(record, dict) else None
    if key is None:
        raise ConfigError(f"no prompt in it; give an object with one of: {', '.join(KEYS)}")
    name, value = str(record.get("id", number)), record[key]
    if key == "messages":
        return Prompt(name, _checked(value))
    turns = value if key == "turns" and isinstance(value, list) else [value]
    if not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ConfigError(f"'{key}' must hold text that is not empty")
    return Prompt(name, ({"role": "user", "content": turns[0]},), cut=len(turns) > 1)


def _checked(messages: Any) -> tuple[Message, ...]:
    fields = ("role", "content")
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(f), str) for f in fields)
        for message in messages
    )
    if not good or not messages:
        raise ConfigError("'messages' must be a list of objects with the texts 'role', 'content'")
    return tuple({field: message[field] for field in fields} for message in messages)


def _filled_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers. Only newlines end a line: prompts may
    hold other separators, at which `splitlines` would cut."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()
