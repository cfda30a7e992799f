"""Text to token ids and back, whole and as a stream.

This uses the `tokenizers` library directly: all that a model's folder or GGUF file describes,
without importing transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from forerun.errors import ModelError, PromptError
from forerun.models.chat_template import ChatTemplate
from forerun.models.foreign import read_json, reason
from forerun.models.gguf_file import GGUFFile
from forerun.models.gguf_tokenizer import build_tokenizer

REPLACEMENT = "\ufffd"  # what bytes that are no character (yet) decode to
WINDOW = 16  # tokens decoded again for each new one, at most, while characters are complete


class Tokenizer:
    """A vocabulary with its rules, and the model's chat template if it has one.

    special_tokens: texts of `bos_token`, `eos_token`, ... as the chat template calls them.
    """

    def __init__(
        self,
        backend: Backend,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = (
            ChatTemplate(chat_template, self.special_tokens) if chat_template else None
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may be padded to more."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """special: add what the model expects around a text, such as its first token.

        Raises `PromptError` for lone surrogates: what Python makes of bytes that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError("the prompt is not valid UTF-8; convert it first") from None
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant begins.

        Raises `PromptError` when the model has no chat template or it refuses the messages.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template; give it raw text, not messages")
        return self.encode(self.chat_template.render(messages), special=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """For decoding token by token."""
        return TextStream(lambda ids: self.decode(ids, skip_special_tokens))

    def token_id(self, text: str) -> int | None:
        """The id of a token of the vocabulary."""
        token: int | None = self.backend.token_to_id(text)
        return token

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token has the same text and id in both."""
        mine, others = (t.backend.get_vocab(with_added_tokens=True) for t in (self, other))
        return bool(mine == others)


class TextStream:
    """Decodes token by token; what it gives, put together, is what decoding all at once gives.

    A token alone may be a part of a character, and may be written with or without a space in front
    depending on what stands before it. So each is decoded behind some of its predecessors.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the decoded window that have been given

    def push(self, token_id: int) -> str:
        """The text that became certain; '' while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(self._window) > WINDOW and certain == text:
            self._shorten()
        return new

    def flush(self) -> str:
        """What was held back at the end of the tokens."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _shorten(self) -> None:
        rest = self._window[-WINDOW // 2 :]
        text = self._decode(rest)
        if text and not text.startswith(REPLACEMENT):
            self._window, self._given = rest, len(text)


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer and chat template in the metadata of a GGUF file."""
    metadata = file.metadata
    try:
        backend = build_tokenizer(metadata)
    except KeyError as error:
        raise ModelError(f"{file.path} lacks the metadata {error}; convert it anew") from None
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special)


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder: tokenizer.json, or older files by way of transformers.

    Raises `ModelError` when there is none or it is damaged.
    """
    settings = _json(folder / "tokenizer_config.json")
    special = {}
    for name, token in (_json(folder / "special_tokens_map.json") | settings).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return Tokenizer(_backend(folder), _template(folder, settings), special)


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise ModelError(f"{path} is damaged ({reason(error)}); fetch it again") from None
    from transformers import AutoTokenizer  # seconds to import, and rarely needed

    try:
        backend: Backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception:  # many kinds, none of which says that files are missing
        raise ModelError(
            f"{folder} has no tokenizer.json, and no other tokenizer that transformers can read; "
            "add it"
        ) from None
    return backend


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    try:
        if isinstance(template, list):  # several, by name
            template = {item["name"]: item["template"] for item in template}.get("default")
        if template is None or isinstance(template, str):
            return template
    except (KeyError, TypeError):
        pass
    raise ModelError(
        f"the chat_template in {folder / 'tokenizer_config.json'} is neither a text nor a list of "
        "named ones; fetch it again"
    )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
