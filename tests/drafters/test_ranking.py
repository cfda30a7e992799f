from __future__ import annotations

import pytest
import torch

from drafting import request
from forerun import sampling
from forerun.drafters.ranking import rank
from forerun.models import kernels
from forerun.models.topk import best
from forerun.sampling import Place

VOCAB = 50
NOISE = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(6, VOCAB, generator=NOISE)
SAMPLED = {"temperature": 0.9, "top_p": 0.9}
EDITED = {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {3: 4.0}, "min_tokens": 5}


def places(paths: int = 3, **values) -> list[Place]:  # type: ignore[no-untyped-def]
    """Two requests, each with rows at one position behind different paths."""
    first, second = (
        request([1, 2, 3 + id], id=id, **{"temperature": 0, **values}, stop=[7]) for id in range(2)
    )
    return [
        *(Place(first, [9, token]) for token in range(paths)),
        *(Place(second, [token]) for token in range(paths)),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"logit_bias": {3: 9.0}},
        {"temperature": 1.2},
        SAMPLED,
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.8},
        EDITED,
    ],
)
def test_the_best_token_is_what_the_target_would_choose(values: dict[str, object]) -> None:
    rows = places(**values)
    tokens_NK, beliefs_NK = rank(LOGITS, rows, 4, None, VOCAB)
    assert tokens_NK[:, 0].tolist() == sampling.choose(LOGITS, rows)
    assert (beliefs_NK[:, :-1] >= beliefs_NK[:, 1:]).all()
    assert (beliefs_NK.sum(-1) <= 1.0001).all()


def test_without_noise_the_order_would_be_another() -> None:
    """The control of the test above."""
    greedy, _ = rank(LOGITS, places(), 1, None, VOCAB)
    assert greedy[:, 0].tolist() != sampling.choose(LOGITS, places(**SAMPLED))


def test_greedy_beliefs_are_probabilities() -> None:
    tokens_NK, beliefs_NK = rank(LOGITS, places(), 3, None, VOCAB)
    probs_NV = LOGITS.softmax(-1)
    assert torch.allclose(beliefs_NK, probs_NV.gather(1, tokens_NK))
    assert torch.equal(tokens_NK, probs_NV.topk(3).indices)


@pytest.mark.parametrize("values", [{}, SAMPLED, EDITED])
def test_a_reduced_vocabulary_ranks_by_the_targets_ids(values: dict[str, object]) -> None:
    """As the whole vocabulary would, if the other tokens were impossible."""
    ids_U = torch.arange(0, VOCAB, 3)
    whole = torch.full_like(LOGITS, -torch.inf)
    whole[:, ids_U] = LOGITS[:, ids_U]
    rows = places(**values)
    reduced = rank(LOGITS[:, ids_U], rows, 3, ids_U, VOCAB)
    expected = rank(whole, rows, 3, None, VOCAB)
    known = expected[1] > 0
    assert torch.equal(reduced[0][known], expected[0][known])
    assert torch.allclose(reduced[1], expected[1], atol=1e-6)


def test_tokens_outside_of_the_law_have_no_belief() -> None:
    _, beliefs_NK = rank(LOGITS, places(temperature=1.0, top_k=2), 4, None, VOCAB)
    assert (beliefs_NK[:, :2] > 0).all()
    assert (beliefs_NK[:, 2:] == 0).all()


def test_mixed_batches_are_ranked_as_each_alone() -> None:
    greedy, sampled = places(), places(**SAMPLED)
    rows = [*greedy[:3], *sampled[3:]]
    tokens, beliefs = rank(LOGITS, rows, 3, None, VOCAB)
    first = rank(LOGITS[:3], greedy[:3], 3, None, VOCAB)
    second = rank(LOGITS[3:], sampled[3:], 3, None, VOCAB)
    assert torch.equal(tokens, torch.cat([first[0], second[0]]))
    assert torch.allclose(beliefs, torch.cat([first[1], second[1]]))


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 200, 1000, 8192])
def test_the_compiled_ranking_is_that_of_torch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, top_k in ((1, 1), (5, min(4, size)), (20, min(16, size)), (3, min(90, size))):
        scores = 8 * torch.randn(rows, size, generator=NOISE)
        scores[0, size // 2 :] = -torch.inf if size > 1 else 0.0
        scores[-1] = scores[-1].sort().values  # every chunk is better than those before
        columns, shares = best(scores, top_k)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "library", lambda: None)
            expected_columns, expected_shares = best(scores, top_k)
        there = expected_shares > 0
        assert torch.equal(columns[there], expected_columns[there])
        torch.testing.assert_close(shares, expected_shares)


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_the_lowest_token_wins_a_tie() -> None:
    scores = torch.zeros(1, 300)
    scores[0, [70, 140, 299]] = 1.0
    assert best(scores, 5)[0].tolist() == [[70, 140, 299, 0, 1]]
