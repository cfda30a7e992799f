"""`eagle:DIR` and `eagle3:DIR`: a layer that runs ahead on the target's hidden states.

Li et al. 2024 and 2025 (arXiv 2401.15077, 2406.16858, 2503.01840). The networks, and which feature
meets which token, are in `models/heads/eagle.py`; how a tree grows is in `growing.py`.

    tokens     x0  x1  ...  x(n-1)                 n tokens, all but the last run by the target
    rows       r0  ...  r(n-2)  |                  stable: row t from feature t and token t + 1
    drafted                     | n-1 | n | ...    one level of the tree each, at that position

Drafted rows are built on guessed features: they are forgotten with the round, and the rows of what
was accepted are computed again from what the target says.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.draft_cache import DraftCache, SideBySide
from forerun.drafters.growing import Growth
from forerun.drafters.ranking import rank
from forerun.drafters.tree import depth_first
from forerun.errors import ConfigError
from forerun.interop import eagle as checkpoint
from forerun.models.heads.eagle import Eagle1, Eagle3, Eagle3Settings, EagleDraft, default_taps
from forerun.models.heads.layers import pack
from forerun.models.hub import locate
from forerun.models.target import opened
from forerun.sampling import Place

WAITING = 512  # features of a request that may wait for their rows
NODES = 16  # of a tree


class EagleOptions(Settings):
    """Options of `eagle` and `eagle3`.

    model: folder or Hub id of the draft. k: how many tokens to look ahead. top_k: candidates per
    node, and nodes that are expanded per level; 1 drafts a chain. nodes: most tokens proposed; by
    default k for a chain, 16 for a tree. min_prob: a level is not begun when all its nodes are less
    likely to survive.
    """

    model: str
    k: Annotated[int, Field(ge=1)] = 4
    top_k: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1)] | None = None
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.1


@dataclass(slots=True)
class Follower:
    """What is known of one request: its rows so far, then features that have none yet."""

    cache: DraftCache
    waiting: list[Tensor] = field(default_factory=list)  # [rows, F]
    hidden_C: Tensor | None = None  # what the last row gave

    @property
    def unfed(self) -> int:
        return sum(len(features_RF) for features_RF in self.waiting)

    @property
    def features(self) -> int:
        return self.cache.stable + self.unfed


@dataclass(frozen=True, slots=True)
class Lane:
    """A request in a round: at most `nodes` tokens, at most `depth` of them in a path."""

    request: Request
    follower: Follower
    nodes: int
    depth: int


class EagleDrafter(Drafter):
    """One packed pass over all requests for the rows that are due, then one per level of the trees.

    A request that has outgrown the positions of the draft goes on without.
    """

    options = EagleOptions
    argument = "model"
    network: ClassVar[type[EagleDraft]]

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        self._target = opened(context.target, self.name)
        info = context.target.info
        network = checkpoint.read(locate(options.model), info.dtype)
        if not isinstance(network, self.network):
            other = "eagle3" if self.name == "eagle" else "eagle"
            raise ConfigError(
                f"{options.model} holds a draft of another kind; write {other}:{options.model}"
            )
        if problems := checkpoint.misfits(network.settings, info):
            raise ConfigError(f"the draft does not fit: {problems[0]}; choose one made for it")
        self._network: EagleDraft = network.to(info.device)
        pack(self._network)
        self._device, self._dtype = info.device, info.dtype
        self._vocab_size = info.vocab_size
        self._ids_U = _target_ids(self._network)
        self._depth, self._min_prob = options.k, options.min_prob
        self._top_k = min(
            options.top_k, info.vocab_size if self._ids_U is None else len(self._ids_U)
        )
        self._nodes = options.nodes or (options.k if self._top_k == 1 else NODES)
        self.makes_trees = self._top_k > 1
        self._followers: dict[int, Follower] = {}
        self._calibration = Calibration()

    @abstractmethod
    def _features(self, taps_RTC: Tensor) -> Tensor:
        """What the network is fed of the taps, [R, F]."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        lanes = {
            request.id: lane
            for request, budget in zip(requests, budgets, strict=True)
            if (lane := self._enter(request, budget))
        }
        if not lanes:
            return [Draft()] * len(requests)
        self._feed([(lane.request, lane.follower) for lane in lanes.values()])
        drafts = dict(zip(lanes, self._grow(list(lanes.values())), strict=True))
        return [drafts.get(request.id, Draft()) for request in requests]

    @torch.inference_mode()
    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTC in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._remember(request, taps_RTC)
        for request in requests:
            follower = self._followers.get(request.id)
            if follower and follower.unfed >= WAITING:
                self._feed([(request, follower)])

    def release(self, request: Request) -> None:
        self._followers.pop(request.id, None)
        self._calibration.forget(request)

    def _remember(self, request: Request, taps_RTC: Tensor) -> None:
        """Keep the features of newly cached tokens, unless some before them were never seen or the
        draft has no positions for them."""
        begin = request.cached - len(taps_RTC)
        if begin == 0:
            c = self._network.settings
            cache = DraftCache(c.layers, c.kv_heads, c.head_dim, self._dtype, self._device)
            self._followers[request.id] = Follower(cache)
        follower = self._followers.get(request.id)
        if follower is None:
            return
        if follower.features != begin or request.cached > self._network.settings.max_length:
            del self._followers[request.id]
        else:
            follower.waiting.append(self._features(taps_RTC))

    def _enter(self, request: Request, budget: int) -> Lane | None:
        """The lane of a request that can be drafted for."""
        follower = self._followers.get(request.id)
        if follower is None or follower.features != len(request.tokens) - 1:
            return None
        # The last level is proposed by a row that is itself one level higher.
        room = self._network.settings.max_length - follower.features + 1
        nodes = min(budget, self._nodes)
        depth = min(nodes, self._depth, request.remaining - 1, room)
        return Lane(request, follower, nodes, depth) if depth > 0 else None

    # ---- rows from features ---------------------------------------------------------------------

    def _feed(self, due: Sequence[tuple[Request, Follower]]) -> None:
        """Turn waiting features into stable rows, in one pass."""
        due = [(request, follower) for request, follower in due if follower.waiting]
        if not due:
            return
        counts = [follower.unfed for _, follower in due]
        tokens: list[int] = []
        positions: list[int] = []
        masks = []
        for (request, follower), count in zip(due, counts, strict=True):
            begin = follower.cache.stable
            tokens += request.tokens[begin + 1 : begin + 1 + count]
            positions += range(begin, begin + count)
            masks.append(self._causal(begin, count))
        features_NF = torch.cat([part for _, follower in due for part in follower.waiting])
        hidden_1NC = self._run(
            self._network.fuse(features_NF[None]),
            torch.tensor([tokens], device=self._device),
            torch.tensor([positions], device=self._device),
            SideBySide([follower.cache for _, follower in due], counts, masks),
        )
        for (_, follower), rows in zip(due, hidden_1NC[0].split(counts), strict=True):
            follower.hidden_C = rows[-1].clone()  # a view would keep all rows alive
            follower.waiting.clear()
            follower.cache.settle()

    def _run(
        self, hidden_1NC: Tensor, tokens_1N: Tensor, positions_1N: Tensor, memory: SideBySide
    ) -> Tensor:
        own = self._network.embed_tokens
        tokens_N = tokens_1N[0]
        embedded_NC = own(tokens_N) if own else self._target.embed(tokens_N, scaled=False)
        out_1NC: Tensor = self._network(hidden_1NC, embedded_NC[None], positions_1N, memory)
        memory.finish()
        return out_1NC

    def _logits(self, hidden_NC: Tensor) -> Tensor:
        states_NC = self._network.readout(hidden_NC)
        head = self._network.lm_head
        return head(states_NC).float() if head else self._target.head_logits(states_NC)

    def _causal(self, begin: int, count: int) -> Tensor | None:
        """What `count` rows behind `begin` others see; None: everything."""
        window = self._network.settings.sliding_window
        if count == 1 and not (window and begin + count > window):
            return None
        mask_RK = torch.ones(count, begin + count, dtype=torch.bool, device=self._device)
        mask_RK = mask_RK.tril_(begin)
        return mask_RK.triu_(begin - window + 1) if window else mask_RK

    # ---- trees ----------------------------------------------------------------------------------

    def _grow(self, lanes: Sequence[Lane]) -> list[Draft]:
        requests = [lane.request for lane in lanes]
        hidden_BC = torch.stack([_last(lane.follower) for lane in lanes])
        roots = self._candidates(requests, hidden_BC[:, None], [Place(each) for each in requests])
        growth = Growth(*(part_B1K[:, 0] for part_B1K in roots))
        paths = _Paths(requests, self._top_k)
        hidden_BKC = hidden_BC[:, None].expand(-1, self._top_k, -1)
        for level in range(1, max(lane.depth for lane in lanes)):
            if self._min_prob and growth.reached_BK.exp().max() < self._min_prob:
                break
            paths.follow(growth)
            hidden_BKC = self._level(lanes, hidden_BKC, growth, level)
            found = self._candidates(requests, hidden_BKC, paths.places)
            growth.extend(*found, self._ended(requests, growth.tokens_BK))
            parents_BK1 = growth.parents_BK[..., None]
            hidden_BKC = hidden_BKC.gather(1, parents_BK1.expand_as(hidden_BKC))
        for lane in lanes:
            lane.follower.cache.rewind()
        drafts = growth.drafts([lane.nodes for lane in lanes], [lane.depth for lane in lanes])
        return [
            self._honest(request, depth_first(draft))
            for request, draft in zip(requests, drafts, strict=True)
        ]

    def _honest(self, request: Request, tree: Draft) -> Draft:
        # Until here, survival stands for the belief in a node given its parent.
        return self._calibration.propose(request, tree.tokens, tree.parents, tree.survival)

    def _level(
        self, lanes: Sequence[Lane], hidden_BKC: Tensor, growth: Growth, level: int
    ) -> Tensor:
        """Run the frontier: what each of its nodes hands to its children, [B, K, C]."""
        lengths = [lane.follower.cache.stable for lane in lanes]
        positions_B1 = torch.tensor(lengths, device=self._device)[:, None] + level - 1
        memory = SideBySide(
            [lane.follower.cache for lane in lanes],
            [self._top_k] * len(lanes),
            [self._visible(b, length, growth, level) for b, length in enumerate(lengths)],
        )
        hidden_1NC = self._run(
            hidden_BKC.flatten(0, 1)[None],
            growth.tokens_BK.view(1, -1),
            positions_B1.expand(-1, self._top_k).reshape(1, -1),
            memory,
        )
        return hidden_1NC[0].view_as(hidden_BKC)

    def _visible(self, b: int, length: int, growth: Growth, level: int) -> Tensor | None:
        """The stable rows and a node's own path; None: everything."""
        window = self._network.settings.sliding_window
        if self._top_k == 1 and not (window and length + level > window):
            return None
        ancestors_KS = growth.ancestors_BKS[b]
        stable_KL = ancestors_KS.new_ones(self._top_k, length)
        mask_KX = torch.cat((stable_KL, ancestors_KS), -1)
        if window:
            levels_S = torch.arange(level, device=self._device).repeat_interleave(self._top_k)
            positions_X = torch.cat((torch.arange(length, device=self._device), length + levels_S))
            mask_KX &= length + level - 1 - positions_X < window
        return mask_KX

    def _candidates(
        self, requests: Sequence[Request], hidden_BKC: Tensor, places: Sequence[Place]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, beliefs and corrected beliefs behind each node, [B, K, top_k]."""
        logits_NU = self._logits(hidden_BKC.flatten(0, 1))
        tokens_NK, beliefs_NK = rank(logits_NU, places, self._top_k, self._ids_U, self._vocab_size)
        chances_BN = self._calibration.estimates(requests, beliefs_NK.view(len(requests), -1))
        shape = (*hidden_BKC.shape[:2], -1)
        return tokens_NK.view(shape), beliefs_NK.view(shape), chances_BN.view(shape)

    def _ended(self, requests: Sequence[Request], tokens_BK: Tensor) -> Tensor | None:
        """Which nodes end a request, so that nothing follows them."""
        most = max(len(request.stop_ids) for request in requests)
        if not most:
            return None
        stops = [
            [*request.stop_ids, *[-1] * (most - len(request.stop_ids))] for request in requests
        ]
        stops_B1S = torch.tensor(stops, device=self._device)[:, None]
        return (tokens_BK[..., None] == stops_B1S).any(-1)


class _Paths:
    """Where the nodes of a frontier stand. Paths are spelled out only for requests that look at
    more than the position and the logits."""

    def __init__(self, requests: Sequence[Request], width: int) -> None:
        self._requests = requests
        self._plain = all(Place(request).is_argmax for request in requests)
        self._paths: list[list[list[int]]] = [[[]] for _ in requests]
        self.places = [Place(request) for request in requests for _ in range(width)]

    def follow(self, growth: Growth) -> None:
        """Go on to the frontier as it is now."""
        if self._plain:
            return
        nodes = zip(growth.parents_BK.tolist(), growth.tokens_BK.tolist(), strict=True)
        self._paths = [
            [[*paths[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            for paths, (parents, tokens) in zip(self._paths, nodes, strict=True)
        ]
        self.places = [
            Place(request, path)
            for request, paths in zip(self._requests, self._paths, strict=True)
            for path in paths
        ]


def _last(follower: Follower) -> Tensor:
    assert follower.hidden_C is not None, "a request has at least one row"
    return follower.hidden_C


def _target_ids(network: EagleDraft) -> Tensor | None:
    """The target's ids of the draft's tokens; None where they are the same."""
    if network.d2t is None:
        return None
    return network.target_ids(torch.arange(len(network.d2t), device=network.d2t.device))


class Eagle(EagleDrafter):
    """EAGLE-1, and with top_k above 1 EAGLE-2."""

    name = "eagle"
    example = "eagle:draft"
    network = Eagle1

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.taps = (context.target.info.layers,)

    def _features(self, taps_RTC: Tensor) -> Tensor:
        return self._target.final_norm(taps_RTC[:, 0])


class EagleThree(EagleDrafter):
    """EAGLE-3 and 3.1."""

    name = "eagle3"
    example = "eagle3:draft"
    network = Eagle3

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        settings = self._network.settings
        assert isinstance(settings, Eagle3Settings)
        self.taps = settings.taps or default_taps(context.target.info.layers)

    def _features(self, taps_RTC: Tensor) -> Tensor:
        return taps_RTC.flatten(1)
