"""`ngram`: copy what followed the last tokens when they stood in the text before.

Prompt lookup (Saxena 2023; LLMA, Yang et al. 2023), with an index that costs O(1) per token.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from forerun.config import Settings
from forerun.core import Draft, Request
from forerun.drafters.base import DraftContext
from forerun.drafters.lookup import Lookup
from forerun.drafters.tree import chain

LONGEST = 32  # a longer match is no better evidence


class NgramOptions(Settings):
    """Options of `ngram`.

    max, min: longest and shortest run of tokens that is looked up; the longest match wins, the
    latest of several. k: most tokens proposed. min_prob: tokens that are less likely to survive
    are not proposed.
    """

    max: Annotated[int, Field(ge=1)] = 4
    min: Annotated[int, Field(ge=1)] = 1
    k: Annotated[int, Field(ge=1)] = 16
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.05

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; raise max")
        return self


class _Index:
    """Where each run of min to max tokens was last followed by something."""

    __slots__ = ("_follows", "_indexed", "_sizes")

    def __init__(self, options: NgramOptions) -> None:
        self._sizes = range(options.max, options.min - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = options.min

    def update(self, tokens: list[int]) -> None:
        """Index what came since the last call; the run at the very end is followed by nothing."""
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))

    def find(self, tokens: list[int]) -> int | None:
        """The position behind the latest earlier occurrence of the longest known ending."""
        for size in self._sizes:
            if size <= len(tokens):
                found = self._follows.get(tuple(tokens[-size:]))
                if found is not None:
                    return found
        return None


class Ngram(Lookup):
    """Proposes a chain: the continuation of the longest and latest match."""

    name = "ngram"
    options = NgramOptions
    example = "ngram"

    def __init__(self, options: NgramOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._options = options
        self._indexes: dict[int, _Index] = {}

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)
        super().release(request)

    def _propose(self, request: Request, budget: int) -> Draft:
        nodes = min(budget, self._options.k, request.remaining - 1)
        if nodes <= 0:
            return Draft()
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index(self._options)
        index.update(request.tokens)
        found = index.find(request.tokens)
        if found is None:
            return Draft()
        tokens = _until_stop(_continuation(request.tokens, found, nodes), request.stop_ids)
        length = _match_length(request.tokens, found)
        beliefs = [_belief(length + depth) for depth in range(len(tokens))]
        return self._calibration.propose(
            request, tokens, chain(len(tokens)), beliefs, min_prob=self._options.min_prob
        )


def _continuation(tokens: list[int], start: int, nodes: int) -> list[int]:
    """What follows from `start` on. Where the text ends the copy reads on in itself, so a text
    that repeats is continued as it goes round."""
    copied = tokens[start : start + nodes]
    while len(copied) < nodes:
        copied += copied[: nodes - len(copied)]
    return copied


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Up to the first token that ends the request, that one included."""
    if stop_ids:
        for index, token in enumerate(tokens):
            if token in stop_ids:
                return tokens[: index + 1]
    return tokens


def _match_length(tokens: list[int], start: int) -> int:
    """How many tokens before `start` equal the last ones."""
    end, length = len(tokens), 0
    while length < min(start, LONGEST) and tokens[start - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


def _belief(length: int) -> float:
    """How likely the same token follows again, before anything is known of this text."""
    return length / (length + 1.5)
