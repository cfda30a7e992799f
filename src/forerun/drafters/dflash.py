"""`dflash:DIR`: a small network drafts a whole block in one pass.

DFlash (Chen et al. 2026, arXiv 2602.06036); the tree over its marginals is DDTree (2604.12989). The
network and the layout of a block are in `models/heads/dflash.py`.

    tokens          0 ............ s-1 | s          s + 1, s + 2, ...
    what is known   taps of the target | the anchor  the block's mask tokens
    kept            keys and values    | pending     never: they end with the pass
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from forerun import sampling
from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.tree import depth_first
from forerun.errors import ConfigError
from forerun.interop import dflash as checkpoint
from forerun.models.heads.dflash import DFlash
from forerun.models.target import opened
from forerun.sampling import Place

PENDING = 512  # context tokens of a request that may wait for their keys and values
NODES = 16  # of a tree


class DFlashOptions(Settings):
    """Options of `dflash`.

    model: folder of the draft. k: how many tokens to look ahead; by default, and at most, what its
    blocks were trained for. top_k: candidates per position; 1 drafts a chain. nodes: most tokens
    proposed; by default k for a chain, 16 for a tree.
    """

    model: str
    k: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1)] | None = None


@dataclass(slots=True)
class Context:
    """What is known of one request: keys and values of its first `length` tokens, then taps."""

    kv: Tensor  # [L, 2, G, capacity, D]
    length: int = 0
    pending: list[Tensor] = field(default_factory=list)  # taps of the tokens behind, [rows, T, E]

    @property
    def waiting(self) -> int:
        return sum(len(taps_RTE) for taps_RTE in self.pending)

    @property
    def tokens(self) -> int:
        return self.length + self.waiting

    def append(self, kv: Tensor) -> None:
        """Add keys and values [L, 2, G, rows, D]; what was pending is settled with it."""
        end = self.length + kv.shape[3]
        if end > self.kv.shape[3]:
            grown = kv.new_zeros(*kv.shape[:3], max(2 * self.kv.shape[3], end, 64), kv.shape[4])
            grown[:, :, :, : self.length] = self.kv[:, :, :, : self.length]
            self.kv = grown
        self.kv[:, :, :, self.length : end] = kv
        self.length = end
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each position, best first, and the belief in each. D positions."""

    tokens: list[list[int]]
    beliefs: list[list[float]]


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
        module = checkpoint.read(Path(options.model).expanduser(), info.dtype)
        if problems := checkpoint.misfits(module.config, info):
            raise ConfigError(f"the draft does not fit: {problems[0]}; choose one made for it")
        config = module.config
        if options.k is not None and options.k > config.drafts:
            raise ConfigError(
                f"{options.model} was trained to draft {config.drafts} tokens; "
                f"use k={config.drafts} or less"
            )
        self._module: DFlash = module.to(info.device)
        self._device = info.device
        self._depth = options.k or config.drafts
        self._width = self._depth + config.first_slot
        self._top_k = min(options.top_k, config.draft_vocab_size or config.vocab_size)
        self._nodes = options.nodes or (self._depth if options.top_k == 1 else NODES)
        self._coupled = not context.independent_noise
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
        logits_BDV = self._block(able, list(asked.values()))
        found = dict(zip(asked, self._candidates(able, logits_BDV), strict=True))
        return [
            self._draft(request, found[request.id], budget) if request.id in found else Draft()
            for request, budget in zip(requests, budgets, strict=True)
        ]

    @torch.inference_mode()
    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTE in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._remember(request, taps_RTE)
        full = [context for context in self._contexts.values() if context.waiting >= PENDING]
        if full:
            self._settle(full)

    def release(self, request: Request) -> None:
        self._contexts.pop(request.id, None)
        self._calibration.forget(request)

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
            weight = self._module.fc.weight
            c = self._module.config
            empty = weight.new_zeros(c.layers, 2, c.kv_heads, 0, c.head_dim)
            self._contexts[request.id] = Context(empty)
        context = self._contexts.get(request.id)
        if context is None:
            return
        if context.tokens != begin or self._outgrown(request):
            del self._contexts[request.id]
        else:
            context.pending.append(taps_RTE)

    def _settle(self, contexts: Sequence[Context]) -> None:
        """Turn all pending taps into keys and values, in one pass."""
        waiting = [context for context in contexts if context.pending]
        if not waiting:
            return
        counts = [context.waiting for context in waiting]
        taps_KTE = torch.cat([taps for context in waiting for taps in context.pending])
        positions_K = torch.cat(
            [
                torch.arange(context.length, context.tokens, device=self._device)
                for context in waiting
            ]
        )
        kv = self._module.context_kv(taps_KTE[None], positions_K[None])[:, :, 0]
        for context, part in zip(waiting, kv.split(counts, dim=3), strict=True):
            context.append(part)

    def _block(self, requests: Sequence[Request], contexts: Sequence[Context]) -> Tensor:
        """Logits of the drafting slots, [B, D, V], in the draft's vocabulary."""
        module, c = self._module, self._module.config
        lengths_B1 = torch.tensor([[context.length] for context in contexts], device=self._device)
        positions_BQ = lengths_B1 + torch.arange(self._width, device=self._device)
        tokens_BQ = torch.full_like(positions_BQ, c.mask_token)
        tokens_BQ[:, 0] = torch.tensor([request.tokens[-1] for request in requests])
        keys = int(lengths_B1.max())
        # Padding lies behind the length of its request, so no anchor sees it.
        context_positions_BK = torch.arange(keys, device=self._device).expand(len(contexts), -1)
        visible = module.visible(
            positions_BQ, lengths_B1.expand(-1, self._width), context_positions_BK
        )
        embedded_NC = module.embed(tokens_BQ.flatten(), self._rows)
        hidden_BQC = module(
            embedded_NC.unflatten(0, tokens_BQ.shape),
            positions_BQ,
            _padded([context.kv[:, :, :, : context.length] for context in contexts], keys),
            visible,
        )
        hidden_BDC = hidden_BQC[:, c.first_slot :]
        logits_NV = module.logits(hidden_BDC.flatten(0, 1), self._target.head_logits)
        return logits_NV.view(len(contexts), self._depth, -1)

    def _rows(self, tokens_N: Tensor) -> Tensor:
        return self._target.embed(tokens_N, scaled=False)

    def _candidates(self, requests: Sequence[Request], logits_BDV: Tensor) -> list[Candidates]:
        """Per request and position, the likeliest tokens; one pass over those without edits."""
        if all(Place(request).is_argmax for request in requests):
            return self._ranked(logits_BDV)
        return [
            self._candidates_of(request, logits_DV)
            for request, logits_DV in zip(requests, logits_BDV, strict=True)
        ]

    def _ranked(self, scores_BDV: Tensor) -> list[Candidates]:
        """The largest scores; beliefs are their share in a softmax."""
        top_BDK, ids_BDK = scores_BDV.topk(self._top_k)
        beliefs_BDK = (top_BDK - scores_BDV.logsumexp(-1, keepdim=True)).exp()
        tokens = self._module.target_ids(ids_BDK).tolist()
        return [Candidates(*each) for each in zip(tokens, beliefs_BDK.tolist(), strict=True)]

    def _candidates_of(self, request: Request, logits_DV: Tensor) -> Candidates:
        """With the request's own parameters and noise, along the likeliest path."""
        tokens: list[list[int]] = []
        beliefs: list[list[float]] = []
        for logits_V in self._in_target_ids(logits_DV):
            place = Place(request, [ranked[0] for ranked in tokens])
            ids, chances = self._choices(place, logits_V)
            tokens.append(ids)
            beliefs.append(chances)
        return Candidates(tokens, beliefs)

    def _choices(self, place: Place, logits_V: Tensor) -> tuple[list[int], list[float]]:
        """Candidates in one place.

        Where the target samples it takes the largest log p + noise. The draft ranks by its own
        log q + the same noise, and believes in a candidate as far as it stands out among them.
        Under independent noise, and where the target is greedy, by log q alone.
        """
        request = place.request
        coupled = self._coupled and not request.params.greedy
        if request.params.greedy:
            place = Place(_warm(request), place.drafted)
        law_V = sampling.law(logits_V, place)
        ids_N = law_V.nonzero()[:, 0]
        scores_N = law_V[ids_N].log()
        if coupled:
            scores_N = scores_N + sampling.gumbel(request.seed, place.position, ids_N)
        top_K, order_K = scores_N.topk(min(self._top_k, len(ids_N)))
        chances_K = (top_K - scores_N.logsumexp(0)).exp()
        return ids_N[order_K].tolist(), chances_K.tolist()

    def _in_target_ids(self, logits_DV: Tensor) -> Tensor:
        config = self._module.config
        if not config.reduced:
            return logits_DV
        whole_DV = logits_DV.new_full((len(logits_DV), config.vocab_size), -torch.inf)
        ids_U = torch.arange(logits_DV.shape[1], device=logits_DV.device)
        whole_DV[:, self._module.target_ids(ids_U)] = logits_DV
        return whole_DV

    def _draft(self, request: Request, candidates: Candidates, budget: int) -> Draft:
        ends = request.stop_ids
        tree = best_tree(candidates, min(budget, self._nodes), lambda token: token in ends)
        # Survival stands for beliefs while the nodes are brought into order.
        tree = depth_first(tree)
        return self._calibration.propose(request, tree.tokens, tree.parents, tree.survival)


def best_tree(candidates: Candidates, nodes: int, ends: Callable[[int], bool]) -> Draft:
    """The `nodes` likeliest prefixes where positions are independent of each other.

    The tree with the largest sum of path probabilities, which is the expected number of accepted
    tokens (DDTree, arXiv 2604.12989): a heap of open nodes yields them in order, and a node that is
    taken opens its next sibling and its first child. `survival` holds the belief in each node,
    given its parent. ends: tokens after which nothing follows.
    """
    tokens: list[int] = []
    parents: list[int] = []
    beliefs: list[float] = []
    # (minus path probability, parent, position, rank, probability of the parent's path)
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(parent: int, depth: int, rank: int, reached: float) -> None:
        if depth < len(candidates.tokens) and rank < len(candidates.tokens[depth]):
            chance = reached * candidates.beliefs[depth][rank]
            heapq.heappush(heap, (-chance, parent, depth, rank, reached))

    offer(-1, 0, 0, 1.0)
    while heap and len(tokens) < nodes:
        negative, parent, depth, rank, reached = heapq.heappop(heap)
        token = candidates.tokens[depth][rank]
        tokens.append(token)
        parents.append(parent)
        beliefs.append(candidates.beliefs[depth][rank])
        offer(parent, depth, rank + 1, reached)
        if not ends(token):
            offer(len(tokens) - 1, depth + 1, 0, -negative)
    return Draft(tokens, parents, beliefs)


def _warm(request: Request) -> Request:
    """The same request at temperature 1, without truncation: its law is that of the logits."""
    warm = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return replace(request, params=request.params.model_copy(update=warm))


def _padded(parts: Sequence[Tensor], keys: int) -> Tensor:
    """[L, 2, G, K, D] of several requests as one [L, 2, B, G, K, D]."""
    if len(parts) == 1:
        return parts[0][:, :, None]
    layers, two, heads, _, size = parts[0].shape
    padded = parts[0].new_zeros(layers, two, len(parts), heads, keys, size)
    for index, part in enumerate(parts):
        padded[:, :, index, :, : part.shape[3]] = part
    return padded
