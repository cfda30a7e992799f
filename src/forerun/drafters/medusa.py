"""`medusa:DIR`: heads on the target's last hidden state guess the tokens ahead all at once.

Cai et al. 2024 (arXiv 2401.10774). The network is in `models/heads/medusa.py`, and as it drafts
in `models/heads/medusa_runner.py`.

    tokens         0 ........... s-2    s-1                   s       s + 1 ...
    known          hidden states        the last committed    head 0  head 1, all from state s-2
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import DraftContext, Drafter, Known
from forerun.drafters.laws import Law
from forerun.drafters.marginals import Candidates
from forerun.drafters.parallel import ParallelDrafter
from forerun.drafters.sources import Source
from forerun.drafters.static_tree import StaticTree
from forerun.errors import ConfigError
from forerun.interop import medusa as checkpoint
from forerun.interop import shipped
from forerun.models.heads.medusa_runner import MedusaRunner
from forerun.models.heads.rounds import Ranked, Rules, Tree

TOP_K, NODES = 10, 16


class MedusaOptions(Settings):
    """Options of `medusa`.

    model: folder or Hub id of the heads, or the model that some ship for. k: how many tokens to
    look ahead; by default, all heads. top_k: candidates per head; 1 drafts a chain. nodes: most
    tokens proposed. The tree is grown anew in every step from what the heads believe.
    tree: instead, a file with the one tree to use: a JSON list of paths, as [[0], [0, 0], [1]].
    """

    model: str
    k: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    nodes: Annotated[int, Field(ge=1)] | None = None
    tree: str | None = None

    @model_validator(mode="after")
    def _one_shape(self) -> MedusaOptions:
        if self.tree is not None and (self.k, self.top_k, self.nodes) != (None, None, None):
            raise ValueError("a tree file leaves nothing to k, top_k and nodes; remove either")
        return self


class Medusa(ParallelDrafter):
    """One pass of the heads per round over the last hidden states of all requests.

    State per request is that one hidden state (with those of its pass), so there is nothing to
    catch up.
    """

    name = "medusa"
    options = MedusaOptions
    argument = "model"
    example = "medusa:heads"

    def __init__(self, options: MedusaOptions, context: DraftContext) -> None:
        super().__init__(context)
        info = context.target.info
        self.look(options, lambda: info)
        folder = shipped.locate(self.name, options.model)
        network = checkpoint.read(folder, info.dtype, info.name)
        config = network.config
        self._tree = tree = (
            StaticTree.read(Path(options.tree).expanduser()) if options.tree else None
        )
        self._depth = tree.depth if tree else options.k or config.heads
        if self._depth > config.heads:
            raise ConfigError(
                f"{options.model} has {config.heads} heads and cannot look {self._depth} tokens "
                f"ahead; use k={config.heads} or a tree of that depth"
            )
        self._runner = MedusaRunner(network, self._target, self._depth)
        if tree:
            top_k, nodes = tree.width, len(tree.parents)
        else:
            top_k = options.top_k or TOP_K
            nodes = options.nodes or (self._depth if top_k == 1 else NODES)
        self._guess(self._runner.ids_U, top_k, nodes)
        self.taps = (info.layers,)
        self._taps: dict[int, Tensor] = {}  # [R, 1, C], of the rows that were cached last

    @classmethod
    def look(cls, options: Settings, known: Known) -> None:
        assert isinstance(options, MedusaOptions)
        folder = shipped.locate(cls.name, options.model)
        config = checkpoint.settings(folder)
        if (info := known()) and (problems := checkpoint.misfits(config, folder, info)):
            raise ConfigError(problems[0])

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        if self._tree:
            return Drafter.laws(self, requests, budgets)
        return super().laws(requests, budgets)

    def sources(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Source]:
        if self._tree:
            return Drafter.sources(self, requests, budgets)
        return super().sources(requests, budgets)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTC in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._taps[request.id] = taps_RTC.contiguous()

    def unfollow(self, request: Request) -> None:
        self._taps.pop(request.id, None)

    def release(self, request: Request) -> None:
        self.unfollow(request)
        self._calibration.forget(request)

    def _is_ready(self, request: Request) -> bool:
        return request.id in self._taps

    def _places(self, nodes: int) -> int:
        return min(self._depth, nodes)  # no tree is deeper than it has nodes

    def _logits(self, requests: Sequence[Request], nodes: int) -> Tensor:
        hidden_BC = torch.cat([self._taps[request.id][-1] for request in requests])
        return self._runner.logits(hidden_BC, self._places(nodes))

    def _tree_of(self, ranked: Candidates, nodes: int, request: Request) -> Draft:
        if self._tree:
            return self._tree.fill(ranked, nodes, request.stop_ids)
        return super()._tree_of(ranked, nodes, request)

    def _has_rounds(self) -> bool:
        return self._runner.rounds is not None and self._tree is None

    def _round(
        self,
        requests: Sequence[Request],
        trees: Sequence[Tree],
        rules: Rules,
        ranked: Sequence[Ranked],
    ) -> None:
        assert self._runner.rounds
        states = [self._taps[each.id] for each in requests]
        self._runner.rounds.draft(states, trees, rules, ranked)
