"""Drafters that guess all places ahead at once, each by itself: Medusa heads and DFlash blocks.

One pass per round gives a law for each place; what is made of them is in `marginals.py`, and where
requests do not edit logits, pass included, in one compiled call (kernels/marginals.c).

B requests, D places ahead, U draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from forerun.core import Draft, Request
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.laws import SILENT, Law
from forerun.drafters.marginals import Candidates, best_tree, candidates, law_of
from forerun.drafters.sources import Source
from forerun.models.heads.rounds import Ranked, Rules, Tree
from forerun.models.target import opened
from forerun.sampling import leaves_logits

T = TypeVar("T")


class ParallelDrafter(Drafter):
    """What is left to a family: its state per request, its pass."""

    def __init__(self, context: DraftContext) -> None:
        self._target = opened(context.target, self.name)
        self._calibration = Calibration()

    def _guess(self, ids_U: Tensor | None, top_k: int, nodes: int) -> None:
        """Propose up to `nodes` tokens of the `top_k` likeliest of each place.

        ids_U: the target's ids of the draft's tokens where they differ.
        """
        self._ids_U = ids_U
        self._top_k = min(top_k, self._target.info.vocab_size if ids_U is None else len(ids_U))
        self._nodes = nodes
        self.makes_trees = top_k > 1

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        asked, nodes = self._able(requests, budgets)
        if not asked:
            return [Draft()] * len(requests)
        if self._has_rounds() and all(map(leaves_logits, asked)):
            drafts = self._in_one_call(asked, nodes)
        else:
            drafts = self._step_by_step(asked, nodes)
        return _spread(drafts, asked, requests, Draft())

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        asked, nodes = self._able(requests, budgets)
        if not asked:
            return [SILENT] * len(requests)
        laws = [law_of(each, self._nodes) for each in self._ranked(asked, max(nodes))]
        return _spread(laws, asked, requests, SILENT)

    def sources(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Source]:
        asked, nodes = self._able(requests, budgets)
        if not asked:
            return [Source()] * len(requests)
        if self._has_rounds() and all(map(leaves_logits, asked)):
            ranked = self._given(asked, nodes)
        else:
            found = self._ranked(asked, max(nodes))
            ranked = [Ranked.of(each.tokens, each.beliefs) for each in found]
        given = [Source.of_places(each, self._nodes) for each in ranked]
        return _spread(given, asked, requests, Source())

    def _able(
        self, requests: Sequence[Request], budgets: Sequence[int]
    ) -> tuple[list[Request], list[int]]:
        """Those that can be drafted for, and how many nodes each may have."""
        asked, nodes = [], []
        for request, budget in zip(requests, budgets, strict=True):
            if budget > 0 and self._is_ready(request):
                asked.append(request)
                nodes.append(min(budget, self._nodes))
        return asked, nodes

    def _ranked(self, requests: Sequence[Request], nodes: int) -> list[Candidates]:
        logits_BDU = self._logits(requests, nodes)
        vocab_size = self._target.info.vocab_size
        return candidates(requests, logits_BDU, self._top_k, self._ids_U, vocab_size)

    def _step_by_step(self, requests: Sequence[Request], nodes: Sequence[int]) -> list[Draft]:
        drafts = []
        ranking = self._ranked(requests, max(nodes))
        for request, ranked, most in zip(requests, ranking, nodes, strict=True):
            tree = self._tree_of(ranked, most, request)  # whose survival stands for belief
            drafts.append(
                self._calibration.propose(request, tree.tokens, tree.parents, tree.survival)
            )
        return drafts

    def _in_one_call(self, requests: Sequence[Request], nodes: Sequence[int]) -> list[Draft]:
        trees, rules = self._trees(requests, nodes)
        self._round(requests, trees, rules, ())
        return [self._calibration.grown(*each) for each in zip(requests, trees, strict=True)]

    def _given(self, requests: Sequence[Request], nodes: Sequence[int]) -> list[Ranked]:
        """The candidates of each place, in one call."""
        trees, rules = self._trees(requests, nodes)
        places = self._places(max(nodes))
        given = [Ranked(places, self._top_k) for _ in requests]
        self._round(requests, trees, rules, given)
        return given

    def _trees(self, requests: Sequence[Request], nodes: Sequence[int]) -> tuple[list[Tree], Rules]:
        rules = self._calibration.rules(self._top_k, self._nodes)
        each = zip(requests, nodes, strict=True)
        return [self._calibration.tree(*one, rules) for one in each], rules

    def _tree_of(self, ranked: Candidates, nodes: int, request: Request) -> Draft:
        """The tree to propose; survival is the belief in each node given its parent."""
        return best_tree(ranked, nodes, request.stop_ids)

    @abstractmethod
    def _is_ready(self, request: Request) -> bool:
        """Whether there is something to draft from."""

    @abstractmethod
    def _places(self, nodes: int) -> int:
        """How many places are looked at for so many nodes."""

    @abstractmethod
    def _logits(self, requests: Sequence[Request], nodes: int) -> Tensor:
        """Of the places ahead that are looked at for so many nodes, [B, D, U]."""

    @abstractmethod
    def _has_rounds(self) -> bool:
        """Whether trees can be had in one call, where requests do not edit logits."""

    @abstractmethod
    def _round(
        self,
        requests: Sequence[Request],
        trees: Sequence[Tree],
        rules: Rules,
        ranked: Sequence[Ranked],
    ) -> None:
        """Grow them in that call, or fill what is `ranked` instead."""


def _spread(
    found: list[T], asked: Sequence[Request], requests: Sequence[Request], nothing: T
) -> list[T]:
    """What was found for those asked, by request; nothing for the others."""
    if len(asked) == len(requests):
        return found
    known = {request.id: each for request, each in zip(asked, found, strict=True)}
    return [known.get(request.id, nothing) for request in requests]
