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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter, Known
from forerun.drafters.calibration import Calibration
from forerun.drafters.growing import Growth
from forerun.drafters.ranking import rank
from forerun.drafters.tree import depth_first
from forerun.errors import CapacityError, ConfigError
from forerun.interop import eagle as checkpoint
from forerun.interop import shipped
from forerun.models.cache import Span
from forerun.models.heads.eagle import Eagle3Settings, default_taps
from forerun.models.heads.eagle_round import EagleRounds, Start
from forerun.models.heads.eagle_runner import EagleRunner
from forerun.models.packing import Part, add, joined, pack_parts
from forerun.models.target import opened
from forerun.sampling import Place, leaves_logits, takes_largest

WAITING = 512  # features of a request that may wait for their rows
NODES = 16  # of a tree


class EagleOptions(Settings):
    """Options of `eagle` and `eagle3`.

    model: folder or Hub id of the draft, or the model one ships for. k: how many tokens to look
    ahead. top_k: candidates per node, and nodes that are expanded per level; 1 drafts a chain.
    nodes: most tokens proposed; by default k for a chain, 16 for a tree. min_prob: a level is not
    begun when all its nodes are less likely to survive.
    """

    model: str
    k: Annotated[int, Field(ge=1)] = 4
    top_k: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1)] | None = None
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.1


@dataclass(slots=True)
class Follower:
    """What is known of one request: its rows so far, then features that have none yet."""

    span: Span
    waiting: list[Tensor] = field(default_factory=list)  # [rows, T, E]
    unfed: int = 0  # rows of them
    hidden_1C: Tensor | None = None  # what the last row gave

    @property
    def features(self) -> int:
        return self.span.length + self.unfed


@dataclass(slots=True)
class Lane:
    """A request in a round, the limits of its tree, and the tree if it grows level by level."""

    request: Request
    follower: Follower
    nodes: int
    depth: int
    growth: Growth = field(init=False)


class EagleDrafter(Drafter):
    """One packed pass over all requests for the rows that are due, then one per level of the trees.

    A request that has outgrown the positions of the draft goes on without.
    """

    options = EagleOptions
    argument = "model"

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        self._target = opened(context.target, self.name)
        info = context.target.info
        self.look(options, lambda: info)
        folder = shipped.locate(self.name, options.model)
        network = checkpoint.read(folder, info.dtype, info.name)
        self._runner = EagleRunner(network, self._target, context.store.slots)
        self._vocab_size = info.vocab_size
        ids_U = self._runner.ids_U
        self._ids = None if ids_U is None else ids_U.tolist()
        self._depth, self._min_prob = options.k, options.min_prob
        self._top_k = min(options.top_k, info.vocab_size if ids_U is None else len(ids_U))
        self._nodes = options.nodes or (options.k if self._top_k == 1 else NODES)
        self.makes_trees = self._top_k > 1
        self._followers: dict[int, Follower] = {}
        self._calibration = Calibration()

    @classmethod
    def look(cls, options: Settings, known: Known) -> None:
        assert isinstance(options, EagleOptions)
        settings = checkpoint.settings(shipped.locate(cls.name, options.model))
        kind = "eagle3" if isinstance(settings, Eagle3Settings) else "eagle"
        if kind != cls.name:
            raise ConfigError(
                f"{options.model} holds a draft of another kind; write {kind}:{options.model}"
            )
        if (info := known()) and (problems := checkpoint.misfits(settings, info)):
            raise ConfigError(f"the draft does not fit: {problems[0]}; choose one made for it")

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        lanes = [
            lane
            for request, budget in zip(requests, budgets, strict=True)
            if (lane := self._enter(request, budget))
        ]
        if not lanes:
            return [Draft()] * len(requests)
        rounds = self._runner.rounds
        if rounds and all(leaves_logits(lane.request) for lane in lanes):
            found = self._round(lanes, rounds)
        else:
            self._feed([(lane.request, lane.follower) for lane in lanes])
            self._grow(lanes, all(takes_largest(lane.request) for lane in lanes))
            found = [self._grown(lane) for lane in lanes]
        if len(lanes) == len(requests):
            return found
        drafts = {lane.request.id: draft for lane, draft in zip(lanes, found, strict=True)}
        return [drafts.get(request.id, Draft()) for request in requests]

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTE in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._remember(request, taps_RTE)
            follower = self._followers.get(request.id)
            if follower and follower.unfed >= WAITING:
                if self._make_room(follower, follower.unfed):
                    self._feed([(request, follower)])
                else:
                    self._forget(request)

    def unfollow(self, request: Request) -> None:
        self._forget(request)

    def release(self, request: Request) -> None:
        self._forget(request)
        self._calibration.forget(request)

    def _forget(self, request: Request) -> None:
        if follower := self._followers.pop(request.id, None):
            self._runner.store.release(follower.span)

    def _remember(self, request: Request, taps_RTE: Tensor) -> None:
        """Keep the features of newly cached tokens, unless some before them were never seen or the
        draft has no positions for them."""
        rows = taps_RTE.shape[0]
        begin = request.cached - rows
        if begin == 0:
            self._forget(request)
            self._followers[request.id] = Follower(self._runner.store.open())
        follower = self._followers.get(request.id)
        if follower is None:
            return
        if follower.features != begin or request.cached > self._runner.settings.max_length:
            self._forget(request)
        else:
            add(follower.waiting, taps_RTE.contiguous())
            follower.unfed += rows

    def _enter(self, request: Request, budget: int) -> Lane | None:
        """The lane of a request that can be drafted for."""
        follower = self._followers.get(request.id)
        if follower is None or follower.features != len(request.tokens) - 1:
            return None
        # The last level is proposed by a row that is itself one level higher.
        room = self._runner.settings.max_length - follower.features + 1
        nodes = min(budget, self._nodes)
        depth = min(nodes, self._depth, request.remaining - 1, room)
        if depth <= 0 or not self._make_room(follower, follower.unfed + (depth - 1) * self._top_k):
            return None
        return Lane(request, follower, nodes, depth)

    def _make_room(self, follower: Follower, rows: int) -> bool:
        """Whether so many rows fit behind the stable ones."""
        try:
            self._runner.store.reserve(follower.span, rows)
        except CapacityError:
            return False
        return True

    # ---- rows from features ---------------------------------------------------------------------

    def _feed(self, due: Sequence[tuple[Request, Follower]]) -> None:
        """Turn waiting features into stable rows, in one pass."""
        due = [(request, follower) for request, follower in due if follower.waiting]
        if not due:
            return
        tokens: list[int] = []
        parts = []
        for request, follower in due:
            rows = _due(request, follower)
            tokens += rows
            parts.append(Part(follower.span, range(-1, len(rows) - 1), len(rows)))
        taps_NTE = joined([part for _, follower in due for part in follower.waiting])
        fused_NC = self._runner.fuse(taps_NTE.flatten(1))
        hidden_NC = self._runner.run(pack_parts(tokens, parts), fused_NC)
        end = 0
        for (_, follower), part in zip(due, parts, strict=True):
            end += part.rows
            follower.hidden_1C = hidden_NC[end - 1 : end].clone()  # a view would keep all alive
            self._committed(follower)

    def _committed(self, follower: Follower) -> None:
        """All that was waiting has its rows."""
        self._runner.store.extend(follower.span, follower.unfed)
        follower.waiting.clear()
        follower.unfed = 0

    # ---- trees ----------------------------------------------------------------------------------

    def _round(self, lanes: Sequence[Lane], rounds: EagleRounds) -> list[Draft]:
        """All of that in one call."""
        calibration = self._calibration
        rules = calibration.rules(self._top_k, self._nodes)
        starts = [self._start(lane) for lane in lanes]
        trees = [calibration.tree(lane.request, lane.nodes, rules) for lane in lanes]
        rounds.draft(starts, trees, rules, self._min_prob)
        drafts = []
        for lane, tree in zip(lanes, trees, strict=True):
            self._committed(lane.follower)
            drafts.append(calibration.grown(lane.request, tree))
        return drafts

    def _start(self, lane: Lane) -> Start:
        request, follower = lane.request, lane.follower
        if follower.hidden_1C is None:
            follower.hidden_1C = self._runner.new_state()
        return Start(
            follower.span,
            joined(follower.waiting) if follower.waiting else None,
            _due(request, follower),
            follower.hidden_1C,
            lane.depth,
        )

    def _grown(self, lane: Lane) -> Draft:
        tree = depth_first(lane.growth.draft())  # whose survival stands for belief
        return self._calibration.propose(lane.request, tree.tokens, tree.parents, tree.survival)

    def _grow(self, lanes: Sequence[Lane], plain: bool) -> None:
        """Let the trees of all lanes grow side by side, one pass per level."""
        for lane in lanes:
            ends, floor = lane.request.stop_ids, self._min_prob
            lane.growth = Growth(lane.nodes, lane.depth, self._top_k, ends, floor)
        hidden_NC = torch.cat([_last(lane.follower) for lane in lanes])
        while True:
            origins = self._extend(lanes, hidden_NC, plain)
            lanes = [lane for lane in lanes if lane.growth.frontier]
            if not lanes:
                return
            hidden_NC = self._level(lanes, _rows(hidden_NC, origins))

    def _extend(self, lanes: Sequence[Lane], hidden_NC: Tensor, plain: bool) -> list[int]:
        """Add what follows the frontiers, whose rows gave hidden_NC; per node of the next
        frontiers, the row that it follows."""
        if plain:
            tokens_NK, beliefs_NK = self._runner.rank(hidden_NC, self._top_k)
        else:
            tokens_NK, beliefs_NK = self._rank(lanes, hidden_NC)
        origins: list[int] = []
        begin = 0
        for lane in lanes:
            growth, request = lane.growth, lane.request
            end = begin + len(growth.frontier)
            beliefs_FK = beliefs_NK[begin:end]
            chances_FK = [
                [self._calibration.estimate(request, belief) for belief in beliefs_K]
                for beliefs_K in beliefs_FK
            ]
            growth.extend(tokens_NK[begin:end], beliefs_FK, chances_FK)
            origins += [begin + origin for origin in growth.origins]
            begin = end
        return origins

    def _rank(
        self, lanes: Sequence[Lane], hidden_NC: Tensor
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As the requests choose: with their noise, their edits."""
        places = [place for lane in lanes for place in _places(lane)]
        ids_U = self._runner.ids_U
        logits_NU = self._runner.logits(hidden_NC)
        tokens_NK, beliefs_NK = rank(logits_NU, places, self._top_k, ids_U, self._vocab_size)
        return tokens_NK.tolist(), beliefs_NK.tolist()

    def _level(self, lanes: Sequence[Lane], hidden_NC: Tensor) -> Tensor:
        """Run the frontiers: what each node hands to its children, [N, C]."""
        tokens = [lane.growth.tokens[node] for lane in lanes for node in lane.growth.frontier]
        parts = [
            Part(lane.follower.span, lane.growth.rows, len(lane.growth.frontier)) for lane in lanes
        ]
        return self._runner.run(pack_parts(tokens, parts), hidden_NC)


def _due(request: Request, follower: Follower) -> list[int]:
    """The tokens that the next rows read, one for each waiting feature."""
    begin = follower.span.length + 1
    return request.tokens[begin : begin + follower.unfed]


def _last(follower: Follower) -> Tensor:
    assert follower.hidden_1C is not None, "a request has at least one row"
    return follower.hidden_1C


def _places(lane: Lane) -> list[Place]:
    return [Place(lane.request, lane.growth.path(node)) for node in lane.growth.frontier]


def _rows(hidden_NC: Tensor, places: list[int]) -> Tensor:
    if places == list(range(len(hidden_NC))):
        return hidden_NC
    return hidden_NC[torch.tensor(places, device=hidden_NC.device)]


class Eagle(EagleDrafter):
    """EAGLE-1, and with top_k above 1 EAGLE-2."""

    name = "eagle"
    example = "eagle:draft"

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.taps = (context.target.info.layers,)


class EagleThree(EagleDrafter):
    """EAGLE-3 and 3.1."""

    name = "eagle3"
    example = "eagle3:draft"

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        settings = self._runner.settings
        assert isinstance(settings, Eagle3Settings)
        self.taps = settings.taps or default_taps(context.target.info.layers)
