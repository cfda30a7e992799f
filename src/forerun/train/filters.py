"""What is no prompt worth answering: empty, degenerate, or there already."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b

# Found by reading what a small model writes: prose, code and tables stay above, loops fall below.
REPETITIVE = 0.3  # compressed size over size, of texts long enough to tell
LONG_ENOUGH = 200  # bytes
DISTINCT = 0.6  # share of different runs of three words, of texts of at least twenty words
SIMILAR = 0.6  # share of runs of three words that two texts have in common
SHINGLE = 3  # words
BANDS, ROWS = 12, 2  # of the sketch: similar texts agree in some band, with 99 % at 0.6


def normalised(text: str) -> str:
    """Composed characters, plain newlines, no space at the ends of lines or of the text."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def fault(text: str) -> str | None:
    """Why a text is no prompt, in a word; None if it may be one."""
    if not any(character.isalnum() for character in text):
        return "empty"
    return "repetitive" if _is_repetitive(text) else None


def _is_repetitive(text: str) -> bool:
    raw = text.encode()
    if len(raw) >= LONG_ENOUGH and len(zlib.compress(raw)) < REPETITIVE * len(raw):
        return True
    words = _words(text)
    if len(words) < 20:
        return False
    runs = list(_runs(words))
    return len(set(runs)) < DISTINCT * len(runs)


class Seen:
    """Texts that have been, and whether another is like one of them.

    `near`: also refuses texts that share most runs of three words with one before (Jaccard
    similarity). Candidates come from a MinHash sketch cut into bands (Broder 1997; Leskovec et
    al., Mining of Massive Datasets, section 3.4), so the effort does not grow with their number.
    """

    def __init__(self, near: bool = False) -> None:
        self.near = near
        self._texts: set[bytes] = set()
        self._shingles: list[frozenset[int]] = []
        self._bands: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def add(self, text: str) -> str | None:
        """Why the text is not new, in a word; None if it is, and then it is remembered.

        Case, and how words are spaced, make no difference.
        """
        words = _words(text)
        digest = blake2b("\0".join(words).encode(), digest_size=16).digest()
        if digest in self._texts:
            return "duplicate"
        if self.near:
            shingles = frozenset(_hash(run) for run in _runs(words))
            bands = list(_bands(shingles))
            candidates = {place for band in bands for place in self._bands.get(band, ())}
            if any(_jaccard(shingles, self._shingles[place]) >= SIMILAR for place in candidates):
                return "near-duplicate"
            for band in bands:
                self._bands[band].append(len(self._shingles))
            self._shingles.append(shingles)
        self._texts.add(digest)
        return None


def _words(text: str) -> list[str]:
    """Words and signs, since in formulas and code the signs tell texts apart."""
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    for begin in range(max(1, len(words) - SHINGLE + 1)):
        yield tuple(words[begin : begin + SHINGLE])


def _hash(run: tuple[str, ...]) -> int:
    return int.from_bytes(blake2b("\0".join(run).encode(), digest_size=8).digest(), "big")


def _bands(shingles: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """The sketch, a band at a time: minima over the shingles, each in an order of its own."""
    for band in range(BANDS):
        rows = range(band * ROWS, (band + 1) * ROWS)
        yield band, *(min(_scrambled(shingle, row) for shingle in shingles) for row in rows)


def _scrambled(value: int, row: int) -> int:
    """A product with another odd number for each row, modulo 2**64, high bits first."""
    return value * (0x9E3779B97F4A7C15 * (2 * row + 1) | 1) % 2**64


def _jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other)
