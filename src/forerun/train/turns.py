"""Where the turns of a conversation lie in its rendering by a chat template.

A template is a program, so its text is not searched for markers. It is rendered with two contents
that share no letter in the place of a turn: what both renderings begin and end with is the text
around that turn, whatever the template does to the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forerun.errors import PromptError
from forerun.models.chat_template import ChatTemplate
from forerun.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Around:
    """The text of a rendering before and behind the content of one message."""

    before: str
    behind: str


def around(template: ChatTemplate, messages: Sequence[Message], index: int, asks: bool) -> Around:
    """The text around the content of message `index`. `asks`: as in `ChatTemplate.render`."""
    one, other = (
        template.render(
            [*messages[:index], {**messages[index], "content": probe}, *messages[index + 1 :]],
            asks,
        )
        for probe in ("a", "b")
    )
    return Around(_common(one, other), _common(one[::-1], other[::-1])[::-1])


def closing(template: ChatTemplate, messages: Sequence[Message], index: int) -> str:
    """The text between message `index` and whatever comes next."""
    last = around(template, messages[: index + 1], index, asks=False).behind
    if index + 1 == len(messages):
        return last
    return _common(last, around(template, messages, index, asks=False).behind)


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own. Raises `PromptError` when it has none."""
    if tokenizer.chat_template is None:
        raise PromptError(
            "this model has no chat template, so it knows no turns; take one tuned on instructions"
        )
    return tokenizer.chat_template


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Control tokens: those that end turns are among them."""
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return frozenset(token for token, about in added if about.special)


def end_of_turn(tokenizer: Tokenizer, closing_text: str) -> list[int]:
    """The tokens of a closing up to its first control token, which is what ends a turn; [] if it
    has none."""
    ids = tokenizer.encode(closing_text, special=False)
    special = special_ids(tokenizer)
    ends = [place for place, token in enumerate(ids) if token in special]
    return ids[: ends[0] + 1] if ends else []


def assistant_spans(
    tokenizer: Tokenizer, messages: Sequence[Message], ended: Sequence[bool]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a conversation, and the span of each assistant turn: first token, behind its
    last.

    A span holds the content and, where `ended`, the control token that ends the turn. The first
    token belongs to it when the token begins in the content, by the tokenizer's own offsets.
    Raises `PromptError` when the template renders a turn in a form that depends on its content.
    """
    template = chat_template(tokenizer)
    text = template.render(messages, asks=False)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    special = special_ids(tokenizer)
    spans = []
    for index, end in zip(_assistant_turns(messages), ended, strict=True):
        place = around(template, messages, index, asks=False)
        stop = len(text) - len(place.behind)
        if not (text.startswith(place.before) and text.endswith(place.behind)):
            raise PromptError(f"the chat template rewrites message {index + 1}; leave it out")
        inside = _tokens_from(encoding.offsets, len(place.before), stop)
        if end:
            limit = stop + len(closing(template, messages, index))
            tail = range(inside[1], _tokens_from(encoding.offsets, stop, limit)[1])
            ends = [place for place in tail if encoding.ids[place] in special]
            inside = (inside[0], ends[0] + 1) if ends else inside
        spans.append(inside)
    return list(encoding.ids), spans


def prompt_key(messages: Sequence[Message]) -> str:
    """Sixteen hex digits of what was asked first: all before the first assistant turn."""
    first = next(_assistant_turns(messages), len(messages))
    asked = [[message["role"], message["content"]] for message in messages[:first]]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest()


def _assistant_turns(messages: Sequence[Message]) -> Iterator[int]:
    return (i for i, message in enumerate(messages) if message["role"] == "assistant")


def _tokens_from(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """The tokens whose first character lies in [begin, end)."""
    first = sum(start < begin for start, _ in offsets)
    return first, sum(start < end for start, _ in offsets)


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    differs = (place for place, (left, right) in pairs if left != right)
    return one[: next(differs, min(len(one), len(other)))]
