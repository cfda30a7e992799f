"""Drafts from marginals: each place ahead has a law of its own, which knows no drafted token.

Medusa heads and DFlash blocks propose so. The tokens of a place do not depend on the path to it,
so the best tree is found without asking the network again.

B requests, D places ahead, U draft vocabulary, K candidates per place.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.core import Draft, Request
from forerun.drafters import ranking
from forerun.drafters.laws import Law, of_places
from forerun.drafters.tree import depth_first
from forerun.models.topk import best
from forerun.sampling import Place


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each place, best first, and the belief in each; 0: not possible."""

    tokens: Sequence[Sequence[int]]
    beliefs: Sequence[Sequence[float]]


def candidates(
    requests: Sequence[Request],
    logits_BDU: Tensor,
    top_k: int,
    ids_U: Tensor | None,
    vocab_size: int,
) -> list[Candidates]:
    """What each request could go on with. Penalties see the likeliest path.

    ids_U: ids of the draft's tokens where they are not those of the target, which has `vocab_size`.
    """
    if all(Place(request).is_argmax for request in requests):  # and then at all places
        return _at_once(logits_BDU, top_k, ids_U)
    tokens: list[list[list[int]]] = [[] for _ in requests]
    beliefs: list[list[list[float]]] = [[] for _ in requests]
    for logits_BU in logits_BDU.unbind(1):
        places = [
            Place(request, [ranked[0] for ranked in path])
            for request, path in zip(requests, tokens, strict=True)
        ]
        ids_BK, beliefs_BK = ranking.rank(logits_BU, places, top_k, ids_U, vocab_size)
        for path, ids in zip(tokens, ids_BK.tolist(), strict=True):
            path.append(ids)
        for path_beliefs, chances in zip(beliefs, beliefs_BK.tolist(), strict=True):
            path_beliefs.append(chances)
    return [Candidates(*each) for each in zip(tokens, beliefs, strict=True)]


def _at_once(logits_BDU: Tensor, top_k: int, ids_U: Tensor | None) -> list[Candidates]:
    """The same where no place looks at more than its logits."""
    places = logits_BDU.shape[1]
    columns_NK, beliefs_NK = best(logits_BDU.flatten(0, 1), min(top_k, logits_BDU.shape[2]))
    tokens = (columns_NK if ids_U is None else ids_U[columns_NK]).tolist()
    beliefs = beliefs_NK.tolist()
    ends = range(places, len(tokens) + 1, places)
    return [Candidates(tokens[end - places : end], beliefs[end - places : end]) for end in ends]


def best_tree(candidates: Candidates, nodes: int, ends: Collection[int] = ()) -> Draft:
    """The `nodes` likeliest prefixes: no tree of that size has a larger sum of path probabilities,
    which is the expected number of accepted tokens.

    Beliefs must not grow along the ranks of a place: a path is then at most as likely as its parent
    and its left sibling, so a heap of open nodes yields them in order; one that is taken opens its
    next sibling and its first child (Cai et al. 2024, section 2.3.3; DDTree, arXiv 2604.12989).
    `survival` holds the belief in each node given its parent. ends: tokens after which nothing
    follows. Nodes come in the order of `depth_first`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    beliefs: list[float] = []
    reached: list[float] = []  # path probability of each node
    last = len(candidates.tokens) - 1
    # Minus path probability, parent, place, rank.
    heap = [(-candidates.beliefs[0][0], -1, 0, 0)]
    while heap and len(tokens) < nodes:
        negative, parent, place, rank = heapq.heappop(heap)
        if not negative:
            break  # and so are all others
        node, token, ranks = len(tokens), candidates.tokens[place][rank], candidates.beliefs[place]
        tokens.append(token)
        parents.append(parent)
        beliefs.append(ranks[rank])
        reached.append(-negative)
        if rank + 1 < len(ranks):
            above = reached[parent] if parent >= 0 else 1.0
            heapq.heappush(heap, (-above * ranks[rank + 1], parent, place, rank + 1))
        if place < last and token not in ends:
            first = candidates.beliefs[place + 1][0]
            heapq.heappush(heap, (negative * first, node, place + 1, 0))
    return depth_first(Draft(tokens, parents, beliefs))


def law_of(candidates: Candidates, nodes: int) -> Law:
    """The law of the same beliefs: what stands before a place does not matter."""
    places = zip(candidates.tokens, candidates.beliefs, strict=True)
    return of_places(
        [[each for each in zip(*place, strict=True) if each[1] > 0] for place in places], nodes
    )
