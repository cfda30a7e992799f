"""`skip:N`: the target drafts for itself with N of its layers left out.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), with evenly spread layers instead of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from forerun.config import Settings
from forerun.core import Draft, Request
from forerun.drafters.autoregressive import AutoregressiveDrafter, Lane
from forerun.drafters.base import DraftContext
from forerun.errors import CapacityError, ConfigError
from forerun.models.target import Segment


class SkipOptions(Settings):
    """Options of `skip`.

    layers: how many are left out. k: most tokens proposed. min_prob: nothing is drafted behind a
    token that is less likely to survive.
    """

    layers: Annotated[int, Field(ge=1)]
    k: Annotated[int, Field(ge=1)] = 4
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.2


class SkipLayers(AutoregressiveDrafter):
    """Shares weights and keys and values with the target.

    The committed prefix is the target's own, as the layers that run find theirs there. Drafted
    rows are written behind it and forgotten; the pass that checks them writes all layers anew.
    """

    name = "skip"
    options = SkipOptions
    argument = "layers"
    example = "skip:1"

    def __init__(self, options: SkipOptions, context: DraftContext) -> None:
        info = context.target.info
        super().__init__(
            context.target,
            context.store,
            kept_layers(info.layers, options.layers),
            info.vocab_size,
            options.min_prob,
            context.independent_noise,
        )
        self._k = options.k
        self._try_out()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        lanes = [
            self._enter(request, min(budget, self._k, request.remaining - 1))
            for request, budget in zip(requests, budgets, strict=True)
        ]
        lengths = [request.cached for request in requests]
        try:
            self._run([lane for lane in lanes if lane])
        finally:
            for lane, length in zip(lanes, lengths, strict=True):
                if lane:
                    self._store.truncate(lane.span, length)
        return [self._draft(lane) if lane else Draft() for lane in lanes]

    def _try_out(self) -> None:
        """Run one row, so that a target that cannot leave layers out says so now."""
        span = self._store.open()
        self._store.reserve(span, 1)
        try:
            self._model.forward([Segment(span, [0])], self._store, layers=self._layers)
        finally:
            self._store.release(span)

    def _enter(self, request: Request, depth: int) -> Lane | None:
        """The lane of a request with room for its rows, or nothing."""
        span = request.span
        assert span is not None
        assert span.length == len(request.tokens) - 1, "all but the last token are cached"
        if depth <= 0:
            return None
        try:
            self._store.reserve(span, depth)
        except CapacityError:
            return None
        return Lane(request, span, depth)


def kept_layers(layers: int, skipped: int) -> list[int]:
    """All but `skipped` layers, spread evenly between the first and the last, which stay."""
    inner = layers - 2
    if skipped > inner:
        cure = f"leave out at most {inner}" if inner > 0 else "choose ngram or suffix instead"
        raise ConfigError(
            f"skip:{skipped} leaves out too many of {layers} layers, as the first and the last "
            f"stay; {cure}"
        )
    dropped = {1 + (2 * index + 1) * inner // (2 * skipped) for index in range(skipped)}
    return [layer for layer in range(layers) if layer not in dropped]
