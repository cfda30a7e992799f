"""Drafts from marginals: each place ahead has a law of its own, which knows no drafted token.

Medusa heads and DFlash blocks propose so. The tokens of a place do not depend on the path to it,
so the best tree is found without asking the network again.

B requests, D places ahead, V vocabulary, N kept tokens, K candidates per place.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from forerun import sampling
from forerun.core import Draft, Request
from forerun.sampling import Place


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each place, best first, and the belief in each."""

    tokens: Sequence[Sequence[int]]
    beliefs: Sequence[Sequence[float]]


def candidates(requests: Sequence[Request], logits_BDV: Tensor, top_k: int) -> list[Candidates]:
    """What each request could go on with.

    Where the target samples, it takes the largest log p + noise. The draft ranks by its own log q +
    the same noise, and believes in a token as far as it stands out among the others. Where the
    target is greedy both go without noise.
    """
    if all(Place(request).is_argmax for request in requests):
        top_BDK, ids_BDK = logits_BDV.topk(min(top_k, logits_BDV.shape[-1]))
        beliefs_BDK = (top_BDK - logits_BDV.logsumexp(-1, keepdim=True)).exp()
        both = zip(ids_BDK.tolist(), beliefs_BDK.tolist(), strict=True)
        return [Candidates(*each) for each in both]
    return [
        _candidates(request, logits_DV, top_k)
        for request, logits_DV in zip(requests, logits_BDV, strict=True)
    ]


def _candidates(request: Request, logits_DV: Tensor, top_k: int) -> Candidates:
    """With the request's own parameters and noise; penalties see the likeliest path."""
    tokens: list[list[int]] = []
    beliefs: list[list[float]] = []
    for logits_V in logits_DV:
        place = Place(request, [ranked[0] for ranked in tokens])
        scores_N, ids_N = _scores(place, logits_V)
        top_K, order_K = scores_N.topk(min(top_k, len(ids_N)))
        tokens.append(ids_N[order_K].tolist())
        beliefs.append((top_K - scores_N.logsumexp(0)).exp().tolist())
    return Candidates(tokens, beliefs)


def _scores(place: Place, logits_V: Tensor) -> tuple[Tensor, Tensor]:
    """What the tokens of a place are ranked by, and their ids."""
    request = place.request
    if request.params.greedy:
        # At temperature 1 and without truncation the law has the order of the edited logits.
        warm = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        params = request.params.model_copy(update=warm)
        place = Place(replace(request, params=params), place.drafted)
    law_V = sampling.law(logits_V, place)
    ids_N = law_V.nonzero()[:, 0]
    scores_N = law_V[ids_N].log()
    if not request.params.greedy:
        scores_N = scores_N + sampling.gumbel(request.seed, place.position, ids_N)
    return scores_N, ids_N


def best_tree(candidates: Candidates, nodes: int, ends: Collection[int] = ()) -> Draft:
    """The `nodes` likeliest prefixes: no tree of that size has a larger sum of path probabilities,
    which is the expected number of accepted tokens.

    Beliefs must not grow along the ranks of a place: a path is then at most as likely as its parent
    and its left sibling, so a heap of open nodes yields them in order; one that is taken opens its
    next sibling and its first child (Cai et al. 2024, section 2.3.3; DDTree, arXiv 2604.12989).
    `survival` holds the belief in each node given its parent. ends: tokens after which nothing
    follows.
    """
    tokens: list[int] = []
    parents: list[int] = []
    beliefs: list[float] = []
    # (minus path probability, parent, place, rank, probability of the parent's path)
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(parent: int, place: int, rank: int, reached: float) -> None:
        if place < len(candidates.tokens) and rank < len(candidates.tokens[place]):
            chance = reached * candidates.beliefs[place][rank]
            heapq.heappush(heap, (-chance, parent, place, rank, reached))

    offer(-1, 0, 0, 1.0)
    while heap and len(tokens) < nodes:
        negative, parent, place, rank, reached = heapq.heappop(heap)
        token = candidates.tokens[place][rank]
        tokens.append(token)
        parents.append(parent)
        beliefs.append(candidates.beliefs[place][rank])
        offer(parent, place, rank + 1, reached)
        if token not in ends:
            offer(len(tokens) - 1, place + 1, 0, -negative)
    return Draft(tokens, parents, beliefs)
