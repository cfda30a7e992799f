"""The tokenizer that the metadata of a GGUF file describes, built with the `tokenizers` library.

Two kinds exist: byte-level BPE ("gpt2"), whose rules for splitting text have a name that llama.cpp
keeps a table of, and SentencePiece BPE ("llama"), whose merges follow from the scores of its
pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as split
from tokenizers.processors import TemplateProcessing

from forerun.config import nearest
from forerun.errors import ModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece writes a space

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> list[Any]:
    return [
        split.Split(Regex(pattern), behavior="isolated"),
        split.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _pre_tokenizers() -> dict[str, list[Any]]:
    gpt2 = split.ByteLevel(add_prefix_space=False, use_regex=True)
    return {
        "gpt-2": [gpt2],
        "smollm": [split.Digits(individual_digits=True), gpt2],
        "llama-bpe": _by_pattern(_LLAMA3),
        "llama3": _by_pattern(_LLAMA3),
        "qwen2": _by_pattern(_QWEN2),
        "tekken": _by_pattern(_TEKKEN),
    }


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises `ModelError` for kinds of tokenizers and splitting rules that are not known here."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(
            f"GGUF tokenizers of kind '{kind}' are not read (only gpt2 and llama); take the folder "
            "of safetensors of this model"
        )
    _add_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata, default=kind == "llama")
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    known = _pre_tokenizers()
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in known:
        raise ModelError(
            f"the GGUF file splits text by the rule '{name}', which is not known here "
            f"({nearest(name, known)}); take the folder of safetensors of this model"
        )
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ignore_merges = name in ("llama-bpe", "llama3")  # whole words of the vocabulary come first
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.Sequence(known[name])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocabulary, metadata)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges(vocabulary: Mapping[str, int], metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, the piece with the highest score first."""
    scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    merges = []
    pieces = [(token, i) for token, i in vocabulary.items() if kinds[i] == NORMAL]
    for token, _ in sorted(pieces, key=lambda piece: -scores[piece[1]]):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((left, right))
    return merges


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones, such as runs of spaces, are found first."""
    marked = list(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    )
    special = [AddedToken(t, normalized=False) for t, kind in marked if kind == CONTROL]
    plain = [AddedToken(t, normalized=False) for t, kind in marked if kind == USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any], default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        token = metadata["tokenizer.ggml.tokens"][bos]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, bos)]
        )
