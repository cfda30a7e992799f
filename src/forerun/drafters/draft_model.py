"""`model:ID`: a smaller model of the same vocabulary drafts a chain.

Leviathan et al. 2023 and Chen et al. 2023 (arXiv 2211.17192, 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from forerun.config import Settings
from forerun.core import Draft, Request
from forerun.drafters.autoregressive import AutoregressiveDrafter, Lane
from forerun.drafters.base import DraftContext, Known
from forerun.errors import CapacityError, ConfigError
from forerun.models.cache import KVStore, Span
from forerun.models.hub import LoadedModel, locate


class DraftModelOptions(Settings):
    """Options of `model`.

    model: folder, file, Hub id or name. k: most tokens proposed. min_prob: nothing is drafted
    behind a token that is less likely to survive.
    """

    model: str
    k: Annotated[int, Field(ge=1)] = 4
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.2


@dataclass(slots=True)
class _Cached:
    """What of a request lies in the draft model's store: its first `committed` tokens, then those
    of `drafted` that were fed."""

    span: Span
    committed: int = 0
    drafted: list[int] = field(default_factory=list)

    def follow(self, store: KVStore, tokens: list[int]) -> None:
        """Keep what the request went on with; the last token stays to be fed."""
        right = 0
        for drafted, token in zip(self.drafted, tokens[self.committed : -1], strict=False):
            if drafted != token:
                break
            right += 1
        store.truncate(self.span, min(self.span.length, self.committed + right))


class DraftModel(AutoregressiveDrafter):
    """A smaller model with its own store, as large in tokens as the target's. Where a request does
    not fit into it, or has outgrown the positions of the model, nothing is proposed."""

    name = "model"
    options = DraftModelOptions
    argument = "model"
    example = "model:draft"

    def __init__(self, options: DraftModelOptions, context: DraftContext) -> None:
        loaded = context.load(options.model)
        _check_vocabulary(loaded, context)
        super().__init__(
            loaded.target,
            loaded.target.new_store(context.store.slots),
            None,
            context.target.info.vocab_size,
            options.min_prob,
            context.independent_noise,
        )
        self._k = options.k
        self._max_length = loaded.target.info.max_length
        self._requests: dict[int, _Cached] = {}

    @classmethod
    def look(cls, options: Settings, known: Known) -> None:
        assert isinstance(options, DraftModelOptions)
        locate(options.model)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        lanes: dict[int, Lane] = {}
        for request, budget in zip(requests, budgets, strict=True):
            lane = self._enter(request, min(budget, self._k, request.remaining - 1))
            if lane:
                lanes[request.id] = lane
        self._run(list(lanes.values()))
        for lane in lanes.values():
            cached = self._requests[lane.request.id]
            cached.committed = len(lane.request.tokens)
            cached.drafted = lane.tokens
        return [
            self._draft(lanes[request.id]) if request.id in lanes else Draft()
            for request in requests
        ]

    def release(self, request: Request) -> None:
        super().release(request)
        cached = self._requests.pop(request.id, None)
        if cached:
            self._store.release(cached.span)

    def _enter(self, request: Request, depth: int) -> Lane | None:
        """The lane of a request with room for its rows, or nothing."""
        tokens = request.tokens
        depth = min(depth, self._max_length - len(tokens))
        if depth <= 0:
            return None
        cached = self._requests.setdefault(request.id, _Cached(self._store.open()))
        cached.follow(self._store, tokens)
        try:
            self._store.reserve(cached.span, len(tokens) + depth - 1 - cached.span.length)
        except CapacityError:
            self.release(request)
            return None
        return Lane(request, cached.span, depth)


def _check_vocabulary(loaded: LoadedModel, context: DraftContext) -> None:
    if context.tokenizer is None:
        same = loaded.target.info.vocab_size == context.target.info.vocab_size
    else:
        same = loaded.tokenizer.same_vocabulary(context.tokenizer)
    if not same:
        raise ConfigError(
            f"draft model '{loaded.name}' has another vocabulary than "
            f"'{context.target.info.name}'; choose a smaller model of the same family, or ngram or "
            "suffix, which fit every model"
        )
