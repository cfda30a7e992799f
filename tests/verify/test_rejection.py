from __future__ import annotations

import pytest
import torch
from torch import Tensor

from enumeration import Toy
from forerun.core import Draft, Request, SamplingParams
from forerun.sampling import Stream, draw
from forerun.verify import Verifier, make_verifier

VOCAB = 6


@pytest.fixture
def verifier() -> Verifier:
    return make_verifier("rejection")


def make_request(seed: int, temperature: float = 1.0) -> Request:
    return Request(seed, [0], 1, SamplingParams(temperature=temperature), seed)


def sampled_chain(model: Toy, request: Request, length: int) -> Draft:
    tokens: list[int] = []
    laws: list[Tensor] = []
    for position in range(1, 1 + length):
        laws.append(model.probs([*request.tokens, *tokens]).float())
        tokens.append(draw(laws[-1], request.seed, position, Stream.DRAFT))
    return Draft(tokens, range(-1, length - 1), [1.0] * length, torch.stack(laws))


def rows(model: Toy, request: Request, draft: Draft) -> Tensor:
    prefixes = [[*request.tokens, *draft.tokens[:i]] for i in range(len(draft) + 1)]
    return torch.stack([model.logits(prefix) for prefix in prefixes]).float()


def test_a_drafter_that_is_the_target_is_accepted(verifier: Verifier) -> None:
    model = Toy(VOCAB, seed=1)
    for seed in range(50):
        request = make_request(seed)
        draft = sampled_chain(model, request, 4)
        [verdict] = verifier.judge([request], [draft], rows(model, request, draft).double())
        # q is p up to rounding, so a chance of acceptance is 1 up to rounding.
        assert list(verdict.path) == [0, 1, 2, 3]


def test_acceptance_is_what_the_laws_promise(verifier: Verifier) -> None:
    """With the real noise: the share of accepted first tokens is 1 - TV(p, q)."""
    p, q = Toy(VOCAB, seed=1), Toy(VOCAB, seed=2)
    expected = torch.minimum(p.probs([0]), q.probs([0])).sum().item()
    accepted = 0
    for seed in range(1000):
        request = make_request(seed)
        draft = sampled_chain(q, request, 1)
        [verdict] = verifier.judge([request], [draft], rows(p, request, draft))
        accepted += len(verdict.path)
    assert accepted / 1000 == pytest.approx(expected, abs=5 * (0.25 / 1000) ** 0.5)


def test_greedy_requests_give_the_greedy_text(verifier: Verifier) -> None:
    p, q = Toy(VOCAB, seed=1), Toy(VOCAB, seed=2)
    follow = make_verifier("follow")
    for seed in range(20):
        request = make_request(seed, temperature=0)
        draft = sampled_chain(q, request, 3)
        logits = rows(p, request, draft)
        assert verifier.judge([request], [draft], logits) == follow.judge(
            [request], [draft], logits
        )


def test_a_batch_mixes_sampled_certain_and_empty_drafts(verifier: Verifier) -> None:
    p, q = Toy(VOCAB, seed=1), Toy(VOCAB, seed=2)
    requests = [make_request(seed) for seed in range(30)]
    drafts = []
    for i, request in enumerate(requests):
        sampled = sampled_chain(q, request, 1 + i % 4)
        certain = Draft(sampled.tokens, sampled.parents, sampled.survival)
        drafts.append([sampled, certain, Draft()][i % 3])
    logits = [rows(p, *pair) for pair in zip(requests, drafts, strict=True)]
    together = verifier.judge(requests, drafts, torch.cat(logits))
    alone = [
        verifier.judge([request], [draft], rows_NV)[0]
        for request, draft, rows_NV in zip(requests, drafts, logits, strict=True)
    ]
    assert together == alone
    assert {len(verdict.path) for verdict in together} > {0}


def test_says_what_it_needs(verifier: Verifier) -> None:
    assert verifier.lossless
    assert verifier.independent_noise
    assert not make_verifier("follow").independent_noise
