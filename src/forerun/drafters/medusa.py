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
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.laws import SILENT, Law
from forerun.drafters.marginals import Candidates, best_tree, candidates, law_of
from forerun.drafters.static_tree import StaticTree
from forerun.errors import ConfigError
from forerun.interop import medusa as checkpoint
from forerun.models.heads.medusa_runner import MedusaRunner
from forerun.models.hub import locate
from forerun.models.target import opened

TOP_K, NODES = 4, 16


class MedusaOptions(Settings):
    """Options of `medusa`.

    model: folder or Hub id of the heads. k: how many tokens to look ahead; by default, all heads.
    top_k: candidates per head; 1 drafts a chain. nodes: most tokens proposed. The tree is grown
    anew in every step from what the heads believe.
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


class Medusa(Drafter):
    """One pass of the heads per round over the last hidden states of all requests.

    State per request is that one hidden state (with those of its pass), so there is nothing to
    catch up.
    """

    name = "medusa"
    options = MedusaOptions
    argument = "model"
    example = "medusa:heads"

    def __init__(self, options: MedusaOptions, context: DraftContext) -> None:
        self._target = opened(context.target, self.name)
        info = context.target.info
        folder = locate(options.model)
        network = checkpoint.read(folder, info.dtype)
        config = network.config
        if problems := checkpoint.misfits(config, folder, info):
            raise ConfigError(problems[0])
        self._tree = StaticTree.read(Path(options.tree).expanduser()) if options.tree else None
        self._depth = self._tree.depth if self._tree else options.k or config.heads
        if self._depth > config.heads:
            raise ConfigError(
                f"{options.model} has {config.heads} heads and cannot look {self._depth} tokens "
                f"ahead; use k={config.heads} or a tree of that depth"
            )
        self._runner = MedusaRunner(network, self._target, self._depth)
        self._top_k = self._tree.width if self._tree else options.top_k or TOP_K
        self._nodes = options.nodes or (self._depth if self._top_k == 1 else NODES)
        self.makes_trees = self._top_k > 1
        self.taps = (info.layers,)
        self._taps: dict[int, Tensor] = {}  # [R, 1, C], of the rows that were cached last
        self._calibration = Calibration()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        ranked = self._ranked(requests, budgets)
        return [
            self._draft(request, ranked[request.id], budget) if request.id in ranked else Draft()
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        if self._tree:
            return super().laws(requests, budgets)
        ranked = self._ranked(requests, budgets)
        return [
            law_of(ranked[request.id], self._nodes) if request.id in ranked else SILENT
            for request in requests
        ]

    def _ranked(self, requests: Sequence[Request], budgets: Sequence[int]) -> dict[int, Candidates]:
        """What the heads say of those requests for which they can say something, by id."""
        able = {
            request.id: request
            for request, budget in zip(requests, budgets, strict=True)
            if budget > 0 and request.id in self._taps
        }
        if not able:
            return {}
        hidden_BC = torch.cat([self._taps[id][-1] for id in able])
        logits_BDU = self._runner.logits(hidden_BC, min(self._depth, max(budgets)))
        found = candidates(
            list(able.values()),
            logits_BDU,
            self._top_k,
            self._runner.ids_U,
            self._target.info.vocab_size,
        )
        return dict(zip(able, found, strict=True))

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request, taps_RTC in zip(requests, taps, strict=True):
            self._calibration.settle(request)
            self._taps[request.id] = taps_RTC

    def release(self, request: Request) -> None:
        self._taps.pop(request.id, None)
        self._calibration.forget(request)

    def _draft(self, request: Request, ranked: Candidates, budget: int) -> Draft:
        if self._tree:
            tree = self._tree.fill(ranked, budget, request.stop_ids)
        else:
            tree = best_tree(ranked, min(budget, self._nodes), request.stop_ids)
        # Until here, survival stands for the belief in a node given its parent.
        return self._calibration.propose(request, tree.tokens, tree.parents, tree.survival)
