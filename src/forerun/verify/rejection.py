"""Speculative sampling as in the papers: exact in distribution, not the text of a seed.

A drafted token x is accepted with probability min(1, p(x) / q(x)); a rejected one leaves
norm(max(p - q, 0)) to its next sibling and, when no sibling is left, to the token that follows
(Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318; siblings:
SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374). p is the target's law at the
node and q is the node's row in `Draft.probs_NV`: the law it was drawn from *given its earlier
siblings*. Drafters that draw siblings without replacement put q without the earlier ones,
renormalised, there; siblings drawn independently share one q.

Drafts without probabilities were certain, and greedy requests leave nothing to draw: for both the
rule is the one of `follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.sampling import Place, Stream, draw, law, uniform
from forerun.verify.base import Verifier
from forerun.verify.follow import follow, root_rows


def acceptance(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """The chance that a token drawn from q is kept as one from p."""
    p, q = float(p_V[token]), float(q_V[token])
    return min(1.0, p / q) if q > 0 else 0.0


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """The law of what follows a rejection, float64, [V]."""
    surplus_V = (p_V.double() - q_V.double()).clamp(min=0)
    mass = surplus_V.sum()
    return surplus_V / mass if mass > 0 else p_V  # no mass: p is q, and nothing is rejected


class Noise(Protocol):
    """The decisions that the rule leaves to chance; tests enumerate them."""

    def accepts(self, chance: float, position: int, sibling: int) -> bool:
        """True with probability `chance`; one independent decision per position and sibling."""
        ...

    def draws(self, probs_V: Tensor, position: int) -> int:
        """A token of the given law, independent of all acceptances and of the draft."""
        ...


class HashNoise:
    """Noise of a request's seed. Streams of their own: reusing the draft's would bias the output.

    A position may be asked again in a later step, because what was drafted there had been
    dropped; that is sound, since nothing that was committed depends on its noise.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def accepts(self, chance: float, position: int, sibling: int) -> bool:
        return uniform(self.seed, position, Stream.ACCEPT, sibling) < chance

    def draws(self, probs_V: Tensor, position: int) -> int:
        return draw(probs_V, self.seed, position, Stream.RESIDUAL)


class Rejection(Verifier):
    """Exact in distribution.

    Must not be paired with a plan that drops sampled nodes by their own value (nor with a drafter
    that does): what is left would no longer be a draw from q.
    """

    name: ClassVar[str] = "rejection"
    independent_noise: ClassVar[bool] = True

    def noise(self, request: Request) -> Noise:
        """Where a request's decisions come from."""
        return HashNoise(request.seed)

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        roots = root_rows(drafts)
        verdicts = {}
        certain = []
        for i, (request, draft, root) in enumerate(zip(requests, drafts, roots, strict=True)):
            if draft.probs_NV is None or not len(draft) or request.params.greedy:
                certain.append(i)
            else:
                rows_NV = logits_NV[root : root + 1 + len(draft)]
                verdicts[i] = walk(request, draft, draft.probs_NV, rows_NV, self.noise(request))
        followed = follow(
            [requests[i] for i in certain],
            [drafts[i] for i in certain],
            logits_NV,
            [roots[i] for i in certain],
        )
        verdicts.update(zip(certain, followed, strict=True))
        return [verdicts[i] for i in range(len(requests))]


def walk(
    request: Request, draft: Draft, probs_NV: Tensor, logits_NV: Tensor, noise: Noise
) -> Verdict:
    """Accept or reject from the root down; an accepted node is a fresh problem of the same kind.

    logits_NV: the root's row, then one per node.
    """
    assert probs_NV.shape == (len(draft), logits_NV.shape[1]), "one law over the vocabulary a node"
    path: list[int] = []
    while True:
        here = path[-1] if path else -1
        place = Place(request, [draft.tokens[node] for node in path])
        p_V = law(logits_NV[1 + here], place)
        children = [node for node, parent in enumerate(draft.parents) if parent == here]
        for sibling, child in enumerate(children):
            chance = acceptance(p_V, probs_NV[child], draft.tokens[child])
            if noise.accepts(chance, place.position, sibling):
                path.append(child)
                break
            p_V = residual(p_V, probs_NV[child])
        else:
            return Verdict(path, noise.draws(p_V, place.position))
