"""Honest survival: what a drafter believes, corrected by what became of its earlier proposals."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from forerun.core import Draft, Request
from forerun.drafters.tree import outcomes, prune

BINS = 32
WEIGHT = 8.0  # decisions that the drafter's own belief counts for
MEMORY = 512.0  # decisions per bin after which old ones start to fade
REQUEST_MEMORY = 32.0  # the same for one request
MOST = 0.99  # nothing is certain


class _Ratio:
    """Right tokens over expected ones, starting at 1 and fading."""

    __slots__ = ("expected", "memory", "right", "value")

    def __init__(self, memory: float) -> None:
        self.right = self.expected = WEIGHT
        self.value = 1.0
        self.memory = memory

    def learn(self, expected: float, right: int) -> None:
        if self.expected > self.memory:
            self.right *= 0.5
            self.expected *= 0.5
        self.expected += expected
        self.right += right
        self.value = self.right / self.expected


class Calibration:
    """Corrects beliefs by two running ratios of right to expected tokens.

    One is kept for each range of beliefs over all requests, one for each request over all beliefs.
    Whatever follows is the judge, whether a node was verified or not, so a drafter whose proposals
    are never verified still learns. ratios: per bin of beliefs, by which they are multiplied.
    """

    def __init__(self) -> None:
        self._bins = [_Ratio(MEMORY) for _ in range(BINS + 1)]
        self.ratios = array("d", [ratio.value for ratio in self._bins])
        self._requests: dict[int, _Ratio] = {}
        self._open: dict[int, tuple[int, Draft, Sequence[float]]] = {}

    def ratio(self, request: Request) -> float:
        """By which beliefs about this request are multiplied, too."""
        own = self._requests.get(request.id)
        return own.value if own else 1.0

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
        self.remember(request, draft, beliefs)
        if not min_prob:
            return draft
        return prune(draft, [n for n, chance in enumerate(survival) if chance >= min_prob])

    def remember(self, request: Request, draft: Draft, beliefs: Sequence[float]) -> None:
        """The same where survival was corrected already, as compiled rounds do."""
        self._open[request.id] = (len(request.tokens), draft, beliefs)

    def correct(self, request: Request, draft: Draft, min_prob: float) -> Draft:
        """The same as `propose`, for a draft whose survival is the drafter's own belief."""
        beliefs = [
            reached / (draft.survival[parent] if parent >= 0 else 1.0)
            for reached, parent in zip(draft.survival, draft.parents, strict=True)
        ]
        return self.propose(request, draft.tokens, draft.parents, beliefs, min_prob=min_prob)

    def settle(self, request: Request) -> None:
        """Learn from the tokens that were committed since the request's last proposal, if any."""
        length, draft, beliefs = self._open.pop(request.id, (0, None, ()))
        if draft is None:
            return
        own = self._requests.get(request.id)
        if own is None:
            own = self._requests[request.id] = _Ratio(REQUEST_MEMORY)
        expected, found = 0.0, 0
        for node, right in outcomes(draft, request.tokens[length:]):
            belief = beliefs[node]
            bin = int(belief * BINS)
            shared = self._bins[bin]
            expected += min(MOST, belief * shared.value)
            found += right
            shared.learn(belief, right)
            self.ratios[bin] = shared.value
        own.learn(expected, found)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._open.pop(request.id, None)
        self._requests.pop(request.id, None)
