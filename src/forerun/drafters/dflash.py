"""`dflash:DIR`: a small network drafts a whole block in one pass.

DFlash (Chen et al. 2026, arXiv 2602.06036); the tree over its marginals is DDTree (2604.12989). The
network and the layout of a block are in `models/heads/dflash.py`.

    tokens          0 ............ s-1 | s          s + 1, s + 2, ...
    what is known   taps of the target | the anchor the block's mask tokens
    kept            keys and values    | nothing: the block ends with the pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.dflash_check import self_check
from forerun.drafters.draft_cache import DraftCache, SideBySide
from forerun.drafters.marginals import Candidates, best_tree, candidates
from forerun.errors import ConfigError
from forerun.interop import dflash as checkpoint
from forerun.models.heads.dflash import DFlash, LayerAttention
from forerun.models.heads.layers import pack
from forerun.models.hub import locate
from forerun.models.target import opened

WAITING = 512  # context tokens of a request that may wait for their keys and values
NODES = 16  # of a tree
QUESTION = "How does a rainbow come about, and why are its colours always in the same order?"


class DFlashOptions(Settings):
    """Options of `dflash`.

    model: folder or Hub id of the draft. k: how many tokens to look ahead; by default, and at most,
    what its blocks were trained for. top_k: candidates per position; 1 drafts a chain. nodes: most
    tokens proposed; by default k for a chain, 16 for a tree.
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

    cache: DraftCache
    waiting: list[Tensor] = field(default_factory=list)  # [rows, T, E]

    @property
    def settled(self) -> int:
        return self.cache.used

    @property
    def unsettled(self) -> int:
        return sum(len(taps_RTE) for taps_RTE in self.waiting)

    @property
    def tokens(self) -> int:
        return self.settled + self.unsettled

    def settle(self, kv: Tensor) -> None:
        """Keep the keys and values [L, 2, G, rows, D] of what was waiting."""
        rows = kv.shape[3]
        self.cache.reserve(rows)
        for layer, (keys_GRD, values_GRD) in enumerate(kv):
            self.cache.write(layer, keys_GRD, values_GRD)
        self.cache.advance(rows)
        self.waiting.clear()


class _Rules:
    """The memory of a block: what a slot sees depends on the layer's rule."""

    def __init__(self, rules: Sequence[LayerAttention], sides: dict[LayerAttention, SideBySide]):
        self.sides = [sides[rule] for rule in rules]

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """See `Memory.attend`."""
        return self.sides[layer].attend(layer, q_BHRD, keys_BGRD, values_BGRD)


class DFlashDrafter(Drafter):
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
        self._target = opened(context.target, self.name)
        info = context.target.info
        module = checkpoint.read(locate(options.model), info.dtype)
        if problems := checkpoint.misfits(module.config, info):
            raise ConfigError(f"the draft does not fit: {problems[0]}; choose one made for it")
        self._module: DFlash = module.to(info.device)
        if options.slots != "stated":
            update = {"anchor_first": self._anchor_first(options.slots, context)}
            module.config = module.config.model_copy(update=update)
        pack(module)
        config = module.config
        if options.k is not None and options.k > config.drafts:
            raise ConfigError(
                f"{options.model} was trained to draft {config.drafts} tokens; "
                f"use k={config.drafts} or less"
            )
        self._device = info.device
        self._depth = options.k or config.drafts
        self._width = self._depth + config.first_slot
        self._top_k = options.top_k
        self._nodes = options.nodes or (self._depth if options.top_k == 1 else NODES)
        self._ids_U = module.token_ids
        self.makes_trees = options.top_k > 1
        self.taps = config.taps
        self._contexts: dict[int, Context] = {}
        self._calibration = Calibration()

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        asked = {
            request.id: context
            for request, budget in zip(requests, budgets, strict=True)
            if budget > 0 and (context := self._ready(request))
        }
        if not asked:
            return [Draft()] * len(requests)
        self._settle(list(asked.values()))
        able = [request for request in requests if request.id in asked]
        logits_BDU = self._block(able, list(asked.values()))
        found = candidates(able, logits_BDU, self._top_k, self._ids_U, self._target.info.vocab_size)
        ranked = dict(zip(asked, found, strict=True))
        return [
            self._draft(request, ranked[request.id], budget) if request.id in ranked else Draft()
            for request, budget in zip(requests, budgets, strict=True)
        ]

    @torch.inference_mode()
    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTE in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._remember(request, taps_RTE)
        full = [context for context in self._contexts.values() if context.unsettled >= WAITING]
        if full:
            self._settle(full)

    def release(self, request: Request) -> None:
        self._contexts.pop(request.id, None)
        self._calibration.forget(request)

    def _anchor_first(self, slots: str, context: DraftContext) -> bool:
        if slots != "check":
            return slots == "anchor-first"
        tokenizer = context.tokenizer
        if tokenizer is None:
            raise ConfigError("slots=check needs a tokenizer; write slots=in-place or anchor-first")
        if tokenizer.has_chat_template:
            prompt = tokenizer.chat([{"role": "user", "content": QUESTION}])
        else:
            prompt = tokenizer.encode(QUESTION)
        return self_check(self._module, self._target, prompt).says_anchor_first

    def _outgrown(self, request: Request) -> bool:
        return len(request.tokens) - 1 + self._width > self._module.config.max_length

    def _ready(self, request: Request) -> Context | None:
        """The context of a request that can be drafted for: complete up to the anchor."""
        context = self._contexts.get(request.id)
        complete = context is not None and context.tokens == len(request.tokens) - 1
        return context if complete and not self._outgrown(request) else None

    def _remember(self, request: Request, taps_RTE: Tensor) -> None:
        """Keep the taps of newly cached tokens, unless some before them were never seen."""
        begin = request.cached - len(taps_RTE)
        if begin == 0:
            c = self._module.config
            self._contexts[request.id] = Context(
                DraftCache(c.layers, c.kv_heads, c.head_dim, self._target.info.dtype, self._device)
            )
        context = self._contexts.get(request.id)
        if context is None:
            return
        if context.tokens != begin or self._outgrown(request):
            del self._contexts[request.id]
        else:
            context.waiting.append(taps_RTE)

    def _settle(self, contexts: Sequence[Context]) -> None:
        """Turn all taps that wait into keys and values, in one pass."""
        due = [context for context in contexts if context.waiting]
        if not due:
            return
        taps_KTE = torch.cat([taps_RTE for context in due for taps_RTE in context.waiting])
        positions_K = torch.cat(
            [torch.arange(each.settled, each.tokens, device=self._device) for each in due]
        )
        kv = self._module.context_kv(taps_KTE[None], positions_K[None])[:, :, 0]
        rows = [context.unsettled for context in due]
        for context, part in zip(due, kv.split(rows, dim=3), strict=True):
            context.settle(part)

    def _block(self, requests: Sequence[Request], contexts: Sequence[Context]) -> Tensor:
        """Logits of the drafting slots, [B, D, U]; the blocks of all requests lie side by side."""
        module, c = self._module, self._module.config
        lengths_B1 = torch.tensor([[each.settled] for each in contexts], device=self._device)
        positions_BQ = lengths_B1 + torch.arange(self._width, device=self._device)
        tokens_BQ = torch.full_like(positions_BQ, c.mask_token)
        tokens_BQ[:, 0] = torch.tensor([request.tokens[-1] for request in requests])
        embedded_NC = module.embed(tokens_BQ.flatten(), self._rows)
        memory = self._memory(contexts, positions_BQ)
        hidden_NC = module(embedded_NC[None], positions_BQ.flatten()[None], memory)[0]
        hidden_BDC = hidden_NC.unflatten(0, positions_BQ.shape)[:, c.first_slot :]
        logits_NU = module.logits(hidden_BDC.flatten(0, 1), self._target.head_logits)
        return logits_NU.view(len(contexts), self._depth, -1)

    def _memory(self, contexts: Sequence[Context], positions_BQ: Tensor) -> _Rules:
        """Nothing is added to the caches: the block's keys and values are overwritten."""
        rules = self._module.config.attention
        caches = [context.cache for context in contexts]
        masks: dict[LayerAttention, list[Tensor | None]] = {rule: [] for rule in rules}
        for positions_Q, context in zip(positions_BQ, contexts, strict=True):
            keys_K = torch.arange(context.settled, device=self._device)
            anchors_Q = positions_Q[:1].expand_as(positions_Q)
            for rule, rows in masks.items():
                sees_all = rule == LayerAttention()
                rows.append(
                    None if sees_all else self._module.sees(rule, positions_Q, anchors_Q, keys_K)
                )
        widths = [self._width] * len(contexts)
        return _Rules(rules, {r: SideBySide(caches, widths, rows) for r, rows in masks.items()})

    def _rows(self, tokens_N: Tensor) -> Tensor:
        return self._target.embed(tokens_N, scaled=False)

    def _draft(self, request: Request, found: Candidates, budget: int) -> Draft:
        tree = best_tree(found, min(budget, self._nodes), request.stop_ids)
        # Until here, survival stands for the belief in a node given its parent.
        return self._calibration.propose(request, tree.tokens, tree.parents, tree.survival)
