"""`dflash:DIR`: a small network drafts a whole block in one pass.

DFlash (Chen et al. 2026, arXiv 2602.06036); the tree over its marginals is DDTree (2604.12989). The
network and the layout of a block are in `models/heads/dflash.py`, and as it drafts in
`models/heads/dflash_runner.py`.

    tokens          0 ............ s-1 | s          s + 1, s + 2, ...
    what is known   taps of the target | the anchor the block's mask tokens
    kept            keys and values    | nothing: the block ends with the pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from forerun.config import Settings
from forerun.core import Request, Verdict
from forerun.drafters.base import DraftContext, Known
from forerun.drafters.dflash_check import self_check
from forerun.drafters.parallel import ParallelDrafter
from forerun.errors import CapacityError, ConfigError
from forerun.interop import dflash as checkpoint
from forerun.interop import shipped
from forerun.models.cache import Span
from forerun.models.heads.dflash import DFlash
from forerun.models.heads.dflash_round import Start
from forerun.models.heads.dflash_runner import DFlashRunner
from forerun.models.heads.rounds import Ranked, Rules, Tree
from forerun.models.packing import add, joined, pack
from forerun.models.target import Segment

WAITING = 512  # context tokens of a request that may wait for their keys and values
NODES = 16  # of a tree
QUESTION = "How does a rainbow come about, and why are its colours always in the same order?"


class DFlashOptions(Settings):
    """Options of `dflash`.

    model: folder or Hub id of the draft, or the model one ships for. k: how many tokens to look
    ahead; by default, and at most, what its blocks were trained for. top_k: candidates per
    position; 1 drafts a chain. nodes: most tokens proposed; by default k for a chain, 16 for a
    tree.
    slots: which slots draft, where the checkpoint should not be believed: in-place or anchor-first;
    `check` tries both on 64 tokens of the target's own text.
    """

    model: str
    k: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1)] | None = None
    slots: Literal["stated", "in-place", "anchor-first", "check"] = "stated"


@dataclass(slots=True)
class Context:
    """What is known of one request: keys and values of its first tokens, then taps of some more."""

    span: Span
    waiting: list[Tensor] = field(default_factory=list)  # [rows, T, E]
    unsettled: int = 0  # rows of them

    @property
    def tokens(self) -> int:
        return self.span.length + self.unsettled


class DFlashDrafter(ParallelDrafter):
    """One packed pass per round over the blocks of all requests.

    Blocks have the same width every time, as published engines run them: slots see each other, so
    a shorter block would propose other tokens. A request that has outgrown the positions of the
    draft goes on without.
    """

    name = "dflash"
    options = DFlashOptions
    argument = "model"
    example = "dflash:draft"

    def __init__(self, options: DFlashOptions, context: DraftContext) -> None:
        super().__init__(context)
        info = context.target.info
        self.look(options, lambda: info)
        folder = shipped.locate(self.name, options.model)
        network = checkpoint.read(folder, info.dtype, info.name).to(info.device)
        if options.slots != "stated":
            update = {"anchor_first": self._anchor_first(network, options.slots, context)}
            network.config = network.config.model_copy(update=update)
        config = network.config
        if options.k is not None and options.k > config.drafts:
            raise ConfigError(
                f"{options.model} was trained to draft {config.drafts} tokens; "
                f"use k={config.drafts} or less"
            )
        self._runner = DFlashRunner(network, self._target, context.store.slots)
        self._depth = options.k or config.drafts
        self._width = self._depth + config.first_slot
        nodes = options.nodes or (self._depth if options.top_k == 1 else NODES)
        self._guess(self._runner.ids_U, options.top_k, nodes)
        self.taps = config.taps
        self._contexts: dict[int, Context] = {}

    @classmethod
    def look(cls, options: Settings, known: Known) -> None:
        assert isinstance(options, DFlashOptions)
        config = checkpoint.settings(shipped.locate(cls.name, options.model))
        if (info := known()) and (problems := checkpoint.misfits(config, info)):
            raise ConfigError(f"the draft does not fit: {problems[0]}; choose one made for it")

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTE in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._remember(request, taps_RTE)
            context = self._contexts.get(request.id)
            if context and context.unsettled >= WAITING and self._has_room(request, context):
                self._settle([context])

    def unfollow(self, request: Request) -> None:
        self._forget(request)

    def release(self, request: Request) -> None:
        self._forget(request)
        self._calibration.forget(request)

    def _anchor_first(self, network: DFlash, slots: str, context: DraftContext) -> bool:
        if slots != "check":
            return slots == "anchor-first"
        tokenizer = context.tokenizer
        if tokenizer is None:
            raise ConfigError("slots=check needs a tokenizer; write slots=in-place or anchor-first")
        if tokenizer.has_chat_template:
            prompt = tokenizer.chat([{"role": "user", "content": QUESTION}])
        else:
            prompt = tokenizer.encode(QUESTION)
        return self_check(network, self._target, prompt).says_anchor_first

    def _outgrown(self, request: Request) -> bool:
        return len(request.tokens) - 1 + self._width > self._runner.config.max_length

    def _is_ready(self, request: Request) -> bool:
        """Whether its context is complete up to the anchor, and a block has its place."""
        context = self._contexts.get(request.id)
        if context is None or context.tokens != len(request.tokens) - 1 or self._outgrown(request):
            return False
        return self._has_room(request, context)

    def _has_room(self, request: Request, context: Context) -> bool:
        """Reserve slots for what waits and a block behind it; without them no more is drafted."""
        try:
            self._runner.store.reserve(context.span, context.unsettled + self._width)
        except CapacityError:
            self._forget(request)
            return False
        return True

    def _remember(self, request: Request, taps_RTE: Tensor) -> None:
        """Keep the taps of newly cached tokens, unless some before them were never seen."""
        rows = taps_RTE.shape[0]
        begin = request.cached - rows
        if begin == 0:
            self._forget(request)
            self._contexts[request.id] = Context(self._runner.store.open())
        context = self._contexts.get(request.id)
        if context is None:
            return
        if context.tokens != begin or self._outgrown(request):
            self._forget(request)
        else:
            add(context.waiting, taps_RTE.contiguous())
            context.unsettled += rows

    def _forget(self, request: Request) -> None:
        if context := self._contexts.pop(request.id, None):
            self._runner.store.release(context.span)

    def _settle(self, contexts: Sequence[Context]) -> None:
        """Turn all taps that wait into keys and values, in one pass."""
        due = [context for context in contexts if context.waiting]
        if not due:
            return
        segments = [Segment(context.span, range(context.unsettled)) for context in due]
        waiting = [taps_RTE for context in due for taps_RTE in context.waiting]
        self._runner.append(pack(segments), joined(waiting))
        for context in due:
            self._settled(context)

    def _settled(self, context: Context) -> None:
        """All that waited has its keys and values."""
        self._runner.store.extend(context.span, context.unsettled)
        context.waiting.clear()
        context.unsettled = 0

    def _places(self, nodes: int) -> int:
        return self._depth  # a block is drafted whole

    def _logits(self, requests: Sequence[Request], nodes: int) -> Tensor:
        """The blocks of all requests lie side by side in one pass."""
        contexts = [self._contexts[request.id] for request in requests]
        self._settle(contexts)
        c = self._runner.config
        masks = [c.mask_token] * (self._width - 1)
        segments = [
            Segment(context.span, [request.tokens[-1], *masks], logits_from=c.first_slot)
            for request, context in zip(requests, contexts, strict=True)
        ]
        logits_NU = self._runner.logits(pack(segments))
        return logits_NU.view(len(contexts), self._depth, -1)

    def _has_rounds(self) -> bool:
        return self._runner.rounds is not None

    def _round(
        self,
        requests: Sequence[Request],
        trees: Sequence[Tree],
        rules: Rules,
        ranked: Sequence[Ranked],
    ) -> None:
        assert self._runner.rounds
        contexts = [self._contexts[request.id] for request in requests]
        starts = []
        for request, context in zip(requests, contexts, strict=True):
            taps_RTE = joined(context.waiting) if context.waiting else None
            starts.append(Start(context.span, context.unsettled, taps_RTE, request.tokens[-1]))
        self._runner.rounds.draft(starts, trees, rules, self._width, ranked)
        for context in contexts:
            self._settled(context)
