"""Counting a corpus: what followed the last tokens in answers, smoothed and cut to a size.

No gradients, one pass, seconds. Interpolated modified Kneser-Ney smoothing (Chen & Goodman 1999,
section 3): every context takes a discount D(c) off each count c and leaves the sum of what it took
to the context one token shorter. Contexts that are not of the longest kind count in how many
different longer contexts a follower stood, not how often. What that gains is in docs/lab-log.md.

P positions that are counted, N pairs of a context and a follower, C contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
from forerun.train.examples import Example, data_hash

SIZE = 8_000_000  # bytes
ORDER = 4  # tokens of the longest contexts
FOLLOWERS = 16  # kept of each context
UNLIKELY = 0.005  # followers below this are not kept
USUAL = (0.0, 0.5, 1.0, 1.5)  # discounts of counts
SIGHTINGS = 2  # contexts that were seen less often are not kept
HEADER_BYTES = 2048  # of the file, before its tables
CONTEXT_BYTES = 12  # without its followers

Ints: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]
Keys: TypeAlias = NDArray[np.uint64]


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
    """The tables of at most `size` bytes: the contexts that were seen oftenest, down to twice.

    Only supervised tokens are counted; what stands before them is context. Raises `ConfigError`
    where there is nothing to count, and for a size that leaves no room.
    """
    if not any(any(example.supervised) for example in examples):
        raise ConfigError("there is no token of an answer to count; give more data")
    tokens_P, before_P, keys_OP = _positions(examples, order)
    contexts = [_contexts(keys_OP, before_P, n) for n in range(order + 1)]
    seldom = _seldom(contexts, size)
    levels: list[_Level] = []
    for n in range(order + 1):
        there_P = before_P >= n
        keys_P, tokens = keys_OP[n][there_P], tokens_P[there_P]
        pairs = _count(keys_P, tokens, keys_OP[n + 1][there_P] if n < order else None)
        kept = contexts[n].kept(seldom)
        if not len(kept.keys_C):
            break  # nor will there be longer ones
        levels.append(_level(kept, pairs, levels[-1] if levels else None))
    return _packed(levels, size, token_type(vocab_size))


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
    tokens_P, before_P, keys_OP = zip(*parts, strict=True)
    return np.concatenate(tokens_P), np.concatenate(before_P), list(np.concatenate(keys_OP, 1))


@dataclass(frozen=True, slots=True)
class _Contexts:
    """All contexts of one length, by key; the keys without the first token; how often each stood
    in the data."""

    keys_C: Keys
    shorter_C: Keys
    seen_C: Ints

    def kept(self, seldom: int) -> _Contexts:
        """Those that were seen `seldom` times or more often."""
        often_C = (self.seen_C >= seldom) | (self.keys_C == EMPTY)
        return _Contexts(self.keys_C[often_C], self.shorter_C[often_C], self.seen_C[often_C])


def _contexts(keys_OP: Sequence[Keys], before_P: Ints, n: int) -> _Contexts:
    there_P = before_P >= n
    keys_C, first_C, seen_C = np.unique(keys_OP[n][there_P], return_index=True, return_counts=True)
    return _Contexts(keys_C, keys_OP[max(0, n - 1)][there_P][first_C], seen_C)


def _seldom(contexts: Sequence[_Contexts], size: int) -> int:
    """How often a context must have been seen if all that are kept are to have a chance to fit."""
    seen = np.sort(np.concatenate([level.seen_C for level in contexts]))[::-1]
    most = size // CONTEXT_BYTES
    return max(SIGHTINGS, int(seen[most]) if most < len(seen) else 0)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Followers of contexts. Those of one context stand side by side."""

    keys_N: Keys
    tokens_N: Ints
    counts_N: Ints


def _count(keys_P: Keys, tokens_P: Ints, longer_P: Keys | None) -> _Pairs:
    """The different pairs, sorted, and how often each occurs, or in how many longer contexts."""
    if longer_P is not None:
        order = np.lexsort((longer_P, tokens_P, keys_P))
        keys_P, tokens_P, longer_P = keys_P[order], tokens_P[order], longer_P[order]
        new_P = _changes(keys_P) | _changes(tokens_P) | _changes(longer_P)
        keys_P, tokens_P = keys_P[new_P], tokens_P[new_P]
    else:
        order = np.lexsort((tokens_P, keys_P))
        keys_P, tokens_P = keys_P[order], tokens_P[order]
    new_P = _changes(keys_P) | _changes(tokens_P)
    counts_N = np.diff(np.append(np.flatnonzero(new_P), len(new_P)))
    return _Pairs(keys_P[new_P], tokens_P[new_P], counts_N)


def _changes(values_N: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Where a value differs from the one before it; the first does."""
    changes_N = np.ones(len(values_N), np.bool_)
    changes_N[1:] = values_N[1:] != values_N[:-1]
    return changes_N


@dataclass(frozen=True, slots=True)
class _Level:
    """The contexts of one length with their followers: `sizes_C` each, likeliest first."""

    contexts: _Contexts
    sizes_C: Ints
    tokens_N: Ints
    chances_N: Reals


def _level(contexts: _Contexts, pairs: _Pairs, shorter: _Level | None) -> _Level:
    """Probabilities of the followers: their own share, and what the shorter context adds."""
    discounts_N = _discounts(pairs.counts_N)[np.minimum(pairs.counts_N, 3)]
    place_N = np.searchsorted(contexts.keys_C, pairs.keys_N)
    place_N[place_N == len(contexts.keys_C)] = 0
    kept_N = contexts.keys_C[place_N] == pairs.keys_N
    place_N, counts_N, discounts_N = place_N[kept_N], pairs.counts_N[kept_N], discounts_N[kept_N]
    tokens_N = pairs.tokens_N[kept_N]
    total_C = np.bincount(place_N, counts_N)
    chances_N = (counts_N - discounts_N) / total_C[place_N]
    if shorter:
        left_C = np.bincount(place_N, discounts_N) / total_C
        heir_M, tokens_M, chances_M = _inherited(contexts, shorter)
        place_N = np.concatenate((place_N, heir_M))
        tokens_N = np.concatenate((tokens_N, tokens_M))
        chances_N = np.concatenate((chances_N, left_C[heir_M] * chances_M))
        place_N, tokens_N, chances_N = _added(place_N, tokens_N, chances_N)
    order = np.lexsort((tokens_N, -chances_N, place_N))
    place_N, tokens_N, chances_N = place_N[order], tokens_N[order], chances_N[order]
    rank_N = np.arange(len(place_N)) - np.searchsorted(place_N, place_N)
    kept_N = (rank_N < FOLLOWERS) & (chances_N >= UNLIKELY)
    sizes_C = np.bincount(place_N[kept_N], minlength=len(contexts.keys_C))
    return _Level(contexts, sizes_C, tokens_N[kept_N], chances_N[kept_N])


def _inherited(contexts: _Contexts, shorter: _Level) -> tuple[Ints, Ints, Reals]:
    """For each context, all followers of the one without its first token."""
    parents_C = np.searchsorted(shorter.contexts.keys_C, contexts.shorter_C)
    sizes_C = shorter.sizes_C[parents_C]
    source_M = _ranges((np.cumsum(shorter.sizes_C) - shorter.sizes_C)[parents_C], sizes_C)
    heir_M = np.arange(len(parents_C)).repeat(sizes_C)
    return heir_M, shorter.tokens_N[source_M], shorter.chances_N[source_M]


def _added(place_N: Ints, tokens_N: Ints, chances_N: Reals) -> tuple[Ints, Ints, Reals]:
    """Every pair once, with the sum of its chances."""
    order = np.lexsort((tokens_N, place_N))
    place_N, tokens_N = place_N[order], tokens_N[order]
    begins = np.flatnonzero(_changes(place_N) | _changes(tokens_N))
    return place_N[begins], tokens_N[begins], np.add.reduceat(chances_N[order], begins)


def _ranges(begins_C: Ints, sizes_C: Ints) -> Ints:
    """The indices begin, begin + 1, ... of each range, one range after the other."""
    return np.arange(sizes_C.sum()) + (begins_C - (np.cumsum(sizes_C) - sizes_C)).repeat(sizes_C)


def _discounts(counts_N: Ints) -> Reals:
    """D(c) for c = 0, 1, 2 and more, estimated from how many pairs have a count of 1, 2, 3 and 4.

    `USUAL` where the data are too few or too regular for that.
    """
    n1, n2, n3, n4 = np.bincount(np.minimum(counts_N, 5), minlength=6)[1:5].tolist()
    if not min(n1, n2, n3, n4):
        return np.array(USUAL)
    share = n1 / (n1 + 2 * n2)
    found = [0, 1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3]
    return np.array(found if min(found[1:]) > 0 else USUAL)


def _packed(levels: Sequence[_Level], size: int, kind: type[np.unsignedinteger[Any]]) -> Tables:
    """The contexts that were seen oftenest, shorter ones first, as many as `size` bytes hold."""
    keys_C = np.concatenate([level.contexts.keys_C for level in levels])
    seen_C = np.concatenate([level.contexts.seen_C for level in levels])
    length_C = np.arange(len(levels)).repeat([len(level.sizes_C) for level in levels])
    sizes_C = np.concatenate([level.sizes_C for level in levels])
    tokens_N = np.concatenate([level.tokens_N for level in levels])
    chances_N = np.concatenate([level.chances_N for level in levels])
    ranked_C = np.lexsort((length_C, -seen_C))
    bytes_C = CONTEXT_BYTES + sizes_C[ranked_C] * (2 + np.dtype(kind).itemsize)
    kept_C = ranked_C[HEADER_BYTES + np.cumsum(bytes_C) <= size]
    if not len(kept_C):
        raise ConfigError(f"no corpus fits into {size} bytes; give some megabytes")
    kept_C = kept_C[np.argsort(keys_C[kept_C])]
    source_N = _ranges((np.cumsum(sizes_C) - sizes_C)[kept_C], sizes_C[kept_C])
    return Tables(
        keys_C=keys_C[kept_C],
        begins_C1=np.append(0, np.cumsum(sizes_C[kept_C])).astype(np.int32),
        followers_E=tokens_N[source_N].astype(kind),
        chances_E=np.floor(chances_N[source_N] * ONE).astype(np.uint16),
    )
