"""The file of `corpus:FILE`: what follows the last tokens in answers that the model wrote before.

One safetensors file, mapped into memory, so that opening it reads next to nothing and processes
share it. C contexts, sorted by key; E followers, those of one context side by side, likeliest
first.

    keys_C        uint64   hash of a context; 0 is the empty one
    begins_C1     int32    context c is followed by begins[c] ... begins[c + 1] - 1
    followers_E   uint16   tokens; uint32 where the vocabulary needs it
    chances_E     uint16   their probabilities in 65535ths, rounded down, shorter contexts included

A context is only there together with all the shorter ones, so that the longest is found from the
empty one on, until one is missing.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from forerun.config import Settings
from forerun.errors import CheckpointError, ConfigError
from forerun.home import written_whole
from forerun.models.foreign import reason
from forerun.models.tokenizer import Tokenizer

FORMAT = "forerun corpus 1"
ONE = 65535  # probability 1

EMPTY = 0
_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def extend(key: int, token: int) -> int:
    """The key of a context with one more token in front."""
    key = (key ^ (token + 1)) * _STEP & _MASK
    return key ^ (key >> 32)


def extend_all(keys_N: NDArray[np.uint64], tokens_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`extend` for many contexts."""
    mixed_N: NDArray[np.uint64] = (keys_N ^ (tokens_N + np.uint64(1))) * np.uint64(_STEP)
    mixed_N ^= mixed_N >> np.uint64(32)
    return mixed_N


class Header(Settings):
    """What a corpus says about itself. order: tokens of its longest contexts.

    vocabulary: fingerprint of the tokenizer. data: hash of what it was counted in; counted: tokens.
    """

    model: str
    vocab_size: int
    vocabulary: str
    order: int
    data: str
    counted: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The arrays of a corpus, as above."""

    keys_C: NDArray[np.uint64]
    begins_C1: NDArray[np.int32]
    followers_E: NDArray[np.unsignedinteger[Any]]
    chances_E: NDArray[np.uint16]


class Corpus:
    """Reads the tables, by views of memory: asking an array library would take longer."""

    def __init__(self, header: Header, tables: Tables) -> None:
        self.header, self.tables = header, tables
        self.order = header.order
        self.contexts, self.followers = len(tables.keys_C), len(tables.followers_E)
        self._keys = tables.keys_C.data
        self._begins = tables.begins_C1.data
        self._followers = tables.followers_E.data
        self._chances = tables.chances_E.data

    def law(self, ending: Sequence[int]) -> dict[int, float]:
        """Tokens that may follow a text, with their probabilities; the sum is at most 1."""
        place = self._longest(ending)
        begin, end = self._begins[place], self._begins[place + 1]
        followers = self._followers[begin:end].tolist()
        return {
            token: chance / ONE
            for token, chance in zip(followers, self._chances[begin:end].tolist(), strict=True)
        }

    def _longest(self, ending: Sequence[int]) -> int:
        """The longest context in which a text ends."""
        keys = self._keys
        found = 0  # the empty one
        key = EMPTY
        for token in reversed(ending[-self.order :]):
            key = extend(key, token)
            place = bisect_left(keys, key)
            if place == self.contexts or keys[place] != key:
                break
            found = place
        return found


def fingerprint(tokenizer: Tokenizer) -> str:
    """Changes with the text or the id of any token."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    text = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, header: Header, tables: Tables) -> None:
    """Write a corpus; a file that is there is replaced at once, when all is written."""
    tensors = {name: torch.from_numpy(array) for name, array in _arrays(tables).items()}
    metadata = {"format": FORMAT, "header": header.model_dump_json()}
    with written_whole(path) as fresh:
        fresh.write_bytes(save(tensors, metadata))


def is_corpus(path: Path) -> bool:
    """Whether a file is a corpus, of any version."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {}).get("format", "")).startswith(FORMAT[:-1])
    except (SafetensorError, OSError):
        return False


def describe(path: Path, vocabulary: str | None = None) -> list[str]:
    """What a corpus is, in plain sentences. `! ` stands before what looks wrong.

    vocabulary: `fingerprint` of the model it is meant for. Raises `CheckpointError` as `read`.
    """
    corpus = read(path)
    header, followers = corpus.header, corpus.followers
    said = [
        f"a corpus counted in {header.counted:,} tokens that {header.model} answered, for its "
        f"vocabulary of {header.vocab_size:,} tokens (tokenizer {header.vocabulary})",
        f"{corpus.contexts:,} contexts of up to {header.order} tokens with {followers:,} followers,"
        f" in {path.stat().st_size / 1e6:.1f} MB",
    ]
    if vocabulary not in (None, header.vocabulary):
        said.append(f"! it was made for another tokenizer than the one given ({vocabulary})")
    return said


def read(path: Path) -> Corpus:
    """Open a corpus. Raises `ConfigError` where there is none, `CheckpointError` if it is torn."""
    if not path.is_file():
        raise ConfigError(f"there is no corpus {path}; make one with: forerun train corpus")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no corpus, or a damaged one ({reason(error)}); "
            "make it with: forerun train corpus"
        ) from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not in the format '{FORMAT}'; make it anew with: forerun train corpus"
        )
    try:
        header = Header(**json.loads(metadata["header"]))
        tables = Tables(**arrays)
        _check(header, tables)
    except (KeyError, TypeError, ValueError, ConfigError):
        raise CheckpointError(
            f"{path}: header and tables contradict each other; "
            "make it anew with: forerun train corpus"
        ) from None
    return Corpus(header, tables)


def _arrays(tables: Tables) -> dict[str, NDArray[Any]]:
    return {name: getattr(tables, name) for name in Tables.__slots__}


def _check(header: Header, tables: Tables) -> None:
    """Raise `ValueError` for tables that a reader could fall over."""
    contexts, followers = len(tables.keys_C), len(tables.followers_E)
    expected: Mapping[str, tuple[type, int]] = {
        "keys_C": (np.uint64, contexts),
        "begins_C1": (np.int32, contexts + 1),
        "followers_E": (token_type(header.vocab_size), followers),
        "chances_E": (np.uint16, followers),
    }
    for name, array in _arrays(tables).items():
        kind, length = expected[name]
        if array.dtype != kind or array.shape != (length,):
            raise ValueError(name)
    begins, keys = tables.begins_C1, tables.keys_C
    if not contexts or keys[0] != EMPTY or not (keys[1:] > keys[:-1]).all():
        raise ValueError("keys_C")
    if begins[0] != 0 or begins[-1] != followers or (begins[1:] < begins[:-1]).any():
        raise ValueError("begins_C1")
    if followers and tables.followers_E.max() >= header.vocab_size:
        raise ValueError("followers_E")


def token_type(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds a token."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32
