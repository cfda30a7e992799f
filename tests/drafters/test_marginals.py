"""Trees over places that do not depend on each other."""

from __future__ import annotations

import itertools

import pytest
import torch

from drafting import request
from forerun import sampling
from forerun.core import Draft
from forerun.drafters.marginals import Candidates, best_tree, candidates
from forerun.drafters.tree import path
from forerun.sampling import Place


def random_candidates(places: int, width: int, seed: int) -> Candidates:
    noise = torch.Generator().manual_seed(seed)
    beliefs = torch.rand(places, width, generator=noise).sort(descending=True).values
    return Candidates(
        [list(range(10 * p, 10 * p + width)) for p in range(places)], beliefs.tolist()
    )


def values(draft: Draft) -> list[float]:
    """The path probability of every node."""
    return [
        torch.tensor([draft.survival[n] for n in path(draft.parents, node)]).double().prod().item()
        for node in range(len(draft))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_its_size_is_worth_more(seed: int) -> None:
    given = random_candidates(places=3, width=4, seed=seed)
    every = sorted(
        (
            torch.tensor([row[r] for row, r in zip(given.beliefs, ranks, strict=False)])
            .double()
            .prod()
            .item()
            for depth in (1, 2, 3)
            for ranks in itertools.product(range(4), repeat=depth)
        ),
        reverse=True,
    )
    for nodes in (1, 2, 5, 11, 40):
        tree = best_tree(given, nodes)
        assert sorted(values(tree), reverse=True) == pytest.approx(every[:nodes])
    whole = best_tree(given, 1000)
    assert len(whole) == len(every) == 4 + 16 + 64


def test_one_candidate_a_place_is_a_chain() -> None:
    tree = best_tree(random_candidates(places=4, width=1, seed=0), 64)
    assert (tree.tokens, tree.parents) == ([0, 10, 20, 30], [-1, 0, 1, 2])


def test_nothing_follows_an_end_or_what_is_impossible() -> None:
    given = Candidates([[7, 8], [1, 2]], [[0.6, 0.4], [0.9, 0.0]])
    tree = best_tree(given, 64, ends={7})
    assert (tree.tokens, tree.parents) == ([7, 8, 1], [-1, -1, 1])


SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5, "presence_penalty": 0.7},
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_who_knows_the_targets_logits_proposes_its_tokens(params: dict[str, object]) -> None:
    """The first candidates are what `choose` would take, place by place, of every request."""
    requests = [request([1, 2, 3], id=0, **params), request([4, 3, 3, 9], id=1, **params)]
    logits_BDV = 2 * torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    for given, ranked, logits_DV in zip(
        requests, candidates(requests, logits_BDV, 4, None, 40), logits_BDV, strict=True
    ):
        chosen: list[int] = []
        for logits_V in logits_DV:
            chosen += sampling.choose(logits_V[None], [Place(given, chosen)])
        assert [tokens[0] for tokens in ranked.tokens] == chosen
        for beliefs in ranked.beliefs:
            assert beliefs == sorted(beliefs, reverse=True)


def test_a_reduced_vocabulary_speaks_in_the_targets_ids() -> None:
    ids_U = torch.tensor([30, 5, 17])
    logits_BDU = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]]])
    (ranked,) = candidates([request([1, 2], temperature=0)], logits_BDU, 2, ids_U, 40)
    assert ranked.tokens == [[17, 5], [30, 17]]
