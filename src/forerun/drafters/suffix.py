"""`suffix`: a tree of what followed the last tokens before, counted over contexts of all lengths.

In the spirit of SuffixDecoding (Oliaro et al., arXiv 2411.04975), with the back-off mixture of a
compression model (prediction by partial matching) in place of its scores, so that every node has a
probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from forerun.config import Settings
from forerun.core import Request
from forerun.drafters.base import DraftContext
from forerun.drafters.counting import Counting, CountingRounds
from forerun.drafters.counts import END, Matches, Trie, mixture
from forerun.drafters.laws import Law
from forerun.drafters.lookup import LawLookup

# Sightings that one sighting counts for: those in the request itself tell more.
REQUEST_WEIGHT = 2.0
PAST_WEIGHT = 0.5


class SuffixOptions(Settings):
    """Options of `suffix`.

    order: longest context. k: most nodes proposed. min_prob: nodes that are less likely to survive
    are not proposed.
    shared: how many past outputs of this engine to learn from, too. How long an answer takes then
    depends on what others were answered before, which the users of one engine may not want.
    """

    order: Annotated[int, Field(ge=1)] = 16
    k: Annotated[int, Field(ge=1)] = 24
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.05
    shared: Annotated[int, Field(ge=0)] = 0


class Suffix(LawLookup):
    """Proposes the most probable paths. State: the counts of each request, and of past outputs."""

    name = "suffix"
    options = SuffixOptions
    example = "suffix:shared=8"

    def __init__(self, options: SuffixOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._options = options
        self._tries: dict[int, Trie] = {}
        self._past = _Past(options) if options.shared else None
        floor = options.min_prob
        if not self._past:
            counting = Counting(
                order=options.order, weight=REQUEST_WEIGHT, negligible=floor, floor=floor
            )
            self._rounds = CountingRounds.make(counting, options.k, depth=options.k)

    def release(self, request: Request) -> None:
        self._tries.pop(request.id, None)
        super().release(request)
        if self._past and request.finish_reason:  # else it will be back, with the same output
            self._past.add(request.output)

    def _law(self, request: Request) -> Law:
        floor = self._options.min_prob
        return Law(
            self._matches(request),
            lambda sources: mixture(sources, floor),
            lambda sources, token: [source.advance(token) for source in sources],
            nodes=self._options.k,
            depth=request.remaining - 1,
            floor=floor,
        )

    def _matches(self, request: Request) -> list[Matches]:
        trie = self._tries.get(request.id)
        if trie is None:
            trie = self._tries[request.id] = Trie(request.tokens, self._options.order)
        trie.update()
        own: list[Matches] = [trie.endings(REQUEST_WEIGHT)]
        return own + self._past.match(request.tokens) if self._past else own


class _Past:
    """Past outputs in two generations: when the younger is full, the older is forgotten."""

    def __init__(self, options: SuffixOptions) -> None:
        self._order = options.order
        self._full = (options.shared + 1) // 2
        self._young = self._old = Trie([], self._order)
        self._outputs = 0

    def add(self, output: list[int]) -> None:
        if self._outputs == self._full:
            self._old, self._young = self._young, Trie([], self._order)
            self._outputs = 0
        self._young.tokens += [*output, END]
        self._young.update()
        self._outputs += 1

    def match(self, tokens: Sequence[int]) -> list[Matches]:
        young: list[Matches] = [self._young.match(tokens, PAST_WEIGHT)]
        return young if self._old is self._young else [*young, self._old.match(tokens, PAST_WEIGHT)]
