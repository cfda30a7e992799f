"""Honest survival: what a drafter believes, corrected by what became of its earlier proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from forerun.core import Draft, Request
from forerun.drafters.ranking import contenders
from forerun.drafters.tree import outcomes, prune
from forerun.models.heads.ratios import Ratios
from forerun.models.heads.rounds import Rules, Tree

BINS = 32
MEMORY = 512.0  # decisions per bin after which old ones start to fade
REQUEST_MEMORY = 32.0  # the same for one request
MOST = 0.99  # nothing is certain


class _Proposal(NamedTuple):
    """A draft and the belief in each node, given its parent."""

    draft: Draft
    beliefs: Sequence[float]


class Calibration:
    """Corrects beliefs by two running ratios of right to expected tokens.

    One is kept for each range of beliefs over all requests, one for each request over all beliefs.
    Whatever follows is the judge, whether a node was verified or not, so a drafter whose proposals
    are never verified still learns. ratios: per bin of beliefs, by which they are multiplied.
    """

    def __init__(self) -> None:
        self._shared = Ratios(BINS + 1, MEMORY)
        self.ratios = self._shared.values
        self._requests: dict[int, Ratios] = {}
        self._rules: dict[tuple[int, int], Rules] = {}
        self._trees: dict[int, Tree] = {}
        self._open: dict[int, tuple[int, _Proposal | Tree]] = {}  # with the length of the request

    def ratio(self, request: Request) -> float:
        """By which beliefs about this request are multiplied, too."""
        own = self._requests.get(request.id)
        return own.values[0] if own else 1.0

    def estimate(self, request: Request, belief: float) -> float:
        """The chance that a node is right whose ancestors are, where the drafter says `belief`."""
        return min(MOST, belief * self.ratios[int(belief * BINS)] * self.ratio(request))

    def estimates(self, requests: Sequence[Request], beliefs_BN: Tensor) -> Tensor:
        """`estimate` for many nodes at once; row b holds beliefs about requests[b]."""
        ratios = beliefs_BN.new_tensor(self.ratios.tolist())
        own_B1 = beliefs_BN.new_tensor([[self.ratio(request)] for request in requests])
        return (beliefs_BN * ratios[(beliefs_BN * BINS).long()] * own_B1).clamp(max=MOST)

    def propose(
        self,
        request: Request,
        tokens: Sequence[int],
        parents: Sequence[int],
        beliefs: Sequence[float],
        probs_NV: Tensor | None = None,
        min_prob: float = 0.0,
    ) -> Draft:
        """A draft with honest survival, without the nodes that are below `min_prob`.

        beliefs: per node, the chance that it is right if its ancestors are. All nodes are
        remembered until `settle`, so that what is never proposed can prove to be worth it.
        """
        ratios = self.ratios
        own = self.ratio(request)
        survival: list[float] = []
        for parent, belief in zip(parents, beliefs, strict=True):  # `estimate`, without its calls
            estimate = belief * ratios[int(belief * BINS)] * own
            reached = survival[parent] if parent >= 0 else 1.0
            survival.append(reached * (estimate if estimate < MOST else MOST))
        draft = Draft(tokens, parents, survival, probs_NV)
        self._open[request.id] = (len(request.tokens), _Proposal(draft, beliefs))
        if not min_prob:
            return draft
        return prune(draft, [n for n, chance in enumerate(survival) if chance >= min_prob])

    def correct(self, request: Request, draft: Draft, min_prob: float) -> Draft:
        """The same as `propose`, for a draft whose survival is the drafter's own belief."""
        beliefs = [
            reached / (draft.survival[parent] if parent >= 0 else 1.0)
            for reached, parent in zip(draft.survival, draft.parents, strict=True)
        ]
        return self.propose(request, draft.tokens, draft.parents, beliefs, min_prob=min_prob)

    def settle(self, request: Request) -> None:
        """Learn from the tokens that were committed since the request's last proposal, if any."""
        opened = self._open.pop(request.id, None)
        if opened is None:
            return
        length, proposal = opened
        truth = request.tokens[length:]
        if isinstance(proposal, Tree):
            proposal.settle(truth)
        else:
            self._learn(request, proposal, truth)

    def _learn(self, request: Request, proposal: _Proposal, truth: Sequence[int]) -> None:
        """As `settle` of kernels/rounds.c."""
        expected, found = 0.0, 0
        for node, right in outcomes(proposal.draft, truth):
            belief = proposal.beliefs[node]
            bin = int(belief * BINS)
            expected += min(MOST, belief * self.ratios[bin])
            found += right
            self._shared.learn(bin, belief, right)
        self._own(request).learn(0, expected, found)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for known in (self._open, self._trees, self._requests):
            known.pop(request.id, None)

    def _own(self, request: Request) -> Ratios:
        own = self._requests.get(request.id)
        if own is None:
            own = self._requests[request.id] = Ratios(1, REQUEST_MEMORY)
        return own

    # ---- trees of compiled rounds ---------------------------------------------------------------

    def rules(self, width: int, nodes: int) -> Rules:
        """For trees of at most `nodes` nodes, grown from `width` candidates a place."""
        rules = self._rules.get((width, nodes))
        if rules is None:
            rules = Rules(width, nodes, contenders(width), self._shared, MOST)
            self._rules[width, nodes] = rules
        return rules

    def tree(self, request: Request, nodes: int, rules: Rules) -> Tree:
        """The tree of a request, to be grown to at most `nodes`; always with the same rules."""
        tree = self._trees.get(request.id)
        if tree is None or tree.ends is not request.stop_ids:
            tree = self._trees[request.id] = Tree(rules, request, self._own(request))
        tree.nodes = nodes
        tree.position = len(request.tokens)
        return tree

    def grown(self, request: Request, tree: Tree) -> Draft:
        """What was grown, remembered as `propose` does; survival is corrected already."""
        self._open[request.id] = (len(request.tokens), tree)
        return tree.draft()
