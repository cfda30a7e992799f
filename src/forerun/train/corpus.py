"""Counting a corpus: what followed the last tokens in answers, smoothed and cut to a size.

No gradients, one pass, seconds. Modified Kneser-Ney smoothing (Chen & Goodman 1999, section 3):
every context takes a discount D(c) from each count c and leaves what it took to the context one
token shorter; contexts that are not the longest count in how many different longer contexts a
follower stood, not how often. What is measured of it stands in docs/lab-log.md.

P positions that are counted, N pairs of context and follower, C contexts, E pairs that are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.corpus_file import (
    EMPTY,
    ONE,
    Header,
    Tables,
    extend_all,
    fingerprint,
    token_type,
    write,
)
from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.train.examples import Example

SIZE = 8_000_000  # bytes
ORDER = 4  # tokens of the longest contexts
FOLLOWERS = 16  # kept of each context; fewer cost acceptance, more cost time
HEADER_BYTES = 2048  # of the file, before its tables
SIGHTINGS = 2  # contexts that were seen less often are not kept

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]


def train(
    examples: Sequence[Example], model: LoadedModel, out: Path, size: int = SIZE, order: int = ORDER
) -> Header:
    """Count the answers of `model` and write the corpus `out`, of at most `size` bytes."""
    vocab_size = model.target.info.vocab_size
    tables = build(examples, vocab_size, size, order)
    header = Header(
        model=model.target.info.name,
        vocab_size=vocab_size,
        vocabulary=fingerprint(model.tokenizer),
        order=order,
        data=data_hash(examples),
        counted=sum(sum(example.supervised) for example in examples),
    )
    write(out, header, tables)
    return header


def build(
    examples: Sequence[Example], vocab_size: int, size: int = SIZE, order: int = ORDER
) -> Tables:
    """The tables of at most `size` bytes: contexts that were seen oftenest are kept, down to two.

    Only supervised tokens are counted; what stands before them is context. Raises `ConfigError`
    where there is nothing to count, and for a size that leaves no room.
    """
    if not any(any(example.supervised) for example in examples):
        raise ConfigError("there is no token of an answer to count; give more data")
    tokens_P, before_P, keys_OP = _positions(examples, order)
    levels = []
    for n in range(order + 1):
        there_P = before_P >= n
        longer_P = keys_OP[n + 1][there_P] if n < order else None
        levels.append(_level(keys_OP[n][there_P], tokens_P[there_P], longer_P))
    return _packed(levels, size, token_type(vocab_size))


def data_hash(examples: Sequence[Example]) -> str:
    """Changes with any token of the examples, and with what is supervised."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.array(example.tokens, np.int64).tobytes() + b"|")
        digest.update(np.array(example.supervised, np.bool_).tobytes() + b"|")
    return digest.hexdigest()[:16]


def _positions(examples: Sequence[Example], order: int) -> tuple[Ints, Ints, list[Keys]]:
    """The supervised tokens, how many tokens stand before each, and the keys of the last 0, 1, ...
    `order` of these. Where there are fewer, the key is that of all there are."""
    parts: list[tuple[Ints, Ints, Keys]] = []
    for example in examples:
        tokens = np.array(example.tokens, np.int64)
        places = np.flatnonzero(example.supervised)
        keys = [np.full(len(places), EMPTY, np.uint64)]
        for n in range(1, order + 1):
            longer = extend_all(keys[-1], tokens[np.maximum(places - n, 0)].astype(np.uint64))
            keys.append(np.where(places >= n, longer, keys[-1]))
        parts.append((tokens[places], places, np.stack(keys)))
    tokens, places, keys = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(places), list(np.concatenate(keys, 1))


@dataclass(frozen=True, slots=True)
class _Level:
    """All contexts of one length, the pairs of each side by side with the likeliest first."""

    keys_C: Keys
    seen_C: Ints  # how often the context stood in the data
    left_C: NDArray[np.float64]
    pairs_C: Ints  # how many followers are kept
    followers_E: Ints
    chances_E: NDArray[np.float64]


def _level(keys_P: Keys, tokens_P: Ints, longer_P: Keys | None) -> _Level:
    keys_N, tokens_N, counts_N = _count(keys_P, tokens_P)
    seen_C = np.add.reduceat(counts_N, _starts(keys_N))
    if longer_P is not None:  # in how many different longer contexts
        order = np.lexsort((longer_P, tokens_P, keys_P))
        sorted_3P = np.stack((keys_P, tokens_P.astype(np.uint64), longer_P))[:, order]
        fresh_P = np.ones(len(order), np.bool_)
        fresh_P[1:] = (sorted_3P[:, 1:] != sorted_3P[:, :-1]).any(0)
        keys_N, tokens_N, counts_N = _count(sorted_3P[0][fresh_P], tokens_P[order][fresh_P])
    discounts_N = _discounts(counts_N)[np.minimum(counts_N, 3)]
    begins_C = _starts(keys_N)
    sizes_C = np.diff(np.append(begins_C, len(keys_N)))
    total_C = np.add.reduceat(counts_N, begins_C)
    chances_N = (counts_N - discounts_N) / total_C.repeat(sizes_C)
    context_N = np.arange(len(begins_C)).repeat(sizes_C)
    best_N = np.lexsort((tokens_N, -chances_N, context_N))
    rank_N = np.arange(len(keys_N)) - begins_C.repeat(sizes_C)
    kept_N = best_N[(rank_N < FOLLOWERS) & (chances_N[best_N] * ONE >= 1)]
    return _Level(
        keys_C=keys_N[begins_C],
        seen_C=seen_C,
        left_C=np.add.reduceat(discounts_N, begins_C) / total_C,
        pairs_C=np.bincount(context_N[kept_N], minlength=len(begins_C)),
        followers_E=tokens_N[kept_N],
        chances_E=chances_N[kept_N],
    )


def _count(keys_P: Keys, tokens_P: Ints) -> tuple[Keys, Ints, Ints]:
    """The different pairs, sorted, and how often each occurs."""
    order = np.lexsort((tokens_P, keys_P))
    keys_P, tokens_P = keys_P[order], tokens_P[order]
    new_P = np.ones(len(order), np.bool_)
    new_P[1:] = (keys_P[1:] != keys_P[:-1]) | (tokens_P[1:] != tokens_P[:-1])
    begins_N = np.flatnonzero(new_P)
    return keys_P[new_P], tokens_P[new_P], np.diff(np.append(begins_N, len(order)))


def _starts(keys_N: Keys) -> Ints:
    """Where each key stands first."""
    new_N = np.ones(len(keys_N), np.bool_)
    new_N[1:] = keys_N[1:] != keys_N[:-1]
    return np.flatnonzero(new_N)


def _discounts(counts_N: Ints) -> NDArray[np.float64]:
    """D(c) for counts of 0, 1, 2 and more (equation 17), kept between none and all of a count."""
    times = np.bincount(np.minimum(counts_N, 5), minlength=6).astype(np.float64)  # c occurs
    share = times[1] / max(1.0, times[1] + 2 * times[2])
    found = [0.0]
    for c in (1, 2, 3):
        ratio = times[c + 1] / times[c] if times[c] else 1.0
        found.append(min(max(c - (c + 1) * share * ratio, 0.1 * c), 0.9 * c))
    return np.array(found)


def _packed(levels: Sequence[_Level], size: int, kind: type[np.uint16] | type[np.uint32]) -> Tables:
    """The contexts that were seen oftenest, shorter ones first, as many as `size` bytes hold."""
    keys_C = np.concatenate([level.keys_C for level in levels])
    seen_C = np.concatenate([level.seen_C for level in levels])
    length_C = np.arange(len(levels)).repeat([len(level.keys_C) for level in levels])
    left_C = np.concatenate([level.left_C for level in levels])
    pairs_C = np.concatenate([level.pairs_C for level in levels])
    followers_E = np.concatenate([level.followers_E for level in levels])
    chances_E = np.concatenate([level.chances_E for level in levels])
    begins_C = np.cumsum(pairs_C) - pairs_C

    ranked_C = np.lexsort((length_C, -seen_C))
    bytes_C = 8 + 4 + 2 + pairs_C[ranked_C] * (2 + np.dtype(kind).itemsize)
    fits_C = (np.cumsum(bytes_C) + HEADER_BYTES <= size) & (seen_C[ranked_C] >= SIGHTINGS)
    fits_C[0] |= bytes_C[0] + HEADER_BYTES <= size  # the empty context, however seldom
    kept_C = ranked_C[fits_C]
    if not len(kept_C):
        raise ConfigError(f"no corpus fits into {size} bytes; give some megabytes")
    kept_C = kept_C[np.argsort(keys_C[kept_C])]
    sizes_C = pairs_C[kept_C]
    begins_C1 = np.append(0, np.cumsum(sizes_C))
    source_E = np.arange(begins_C1[-1]) + (begins_C[kept_C] - begins_C1[:-1]).repeat(sizes_C)
    return Tables(
        keys_C=keys_C[kept_C],
        begins_C1=begins_C1.astype(np.int32),
        left_C=np.floor(left_C[kept_C] * ONE).astype(np.uint16),
        followers_E=followers_E[source_E].astype(kind),
        chances_E=np.floor(chances_E[source_E] * ONE).astype(np.uint16),
    )
