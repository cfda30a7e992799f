from __future__ import annotations

import math

import pytest
import torch

from forerun.core import Draft, Request, SamplingParams
from forerun.verify import make_verifier
from forerun.verify.typical import Typical


def request(temperature: float = 1.0) -> Request:
    return Request(0, [0], 1, SamplingParams(temperature=temperature), seed=0)


def rows(*laws: list[float]) -> torch.Tensor:
    return torch.tensor(laws, dtype=torch.float64).log()


def test_the_threshold_is_the_smaller_of_the_two() -> None:
    typical = Typical()
    p_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    entropy = -sum(p * math.log(p + 1e-5) for p in p_V.tolist())
    assert 0.3 * math.exp(-entropy) == pytest.approx(0.107, abs=5e-4)
    assert typical.threshold(p_V) == 0.09
    flat_V = torch.full((10,), 0.1, dtype=torch.float64)
    assert typical.threshold(flat_V) == pytest.approx(0.03, rel=1e-3)


def test_any_plausible_token_is_accepted() -> None:
    law = [0.5, 0.3, 0.195, 0.005]
    for token, accepted in ((0, True), (1, True), (2, True), (3, False)):
        draft = Draft([token], [-1], [1.0])
        [verdict] = make_verifier("typical").judge([request()], [draft], rows(law, law))
        assert list(verdict.path) == ([0] if accepted else [])


def test_the_longest_path_wins_then_the_likeliest() -> None:
    law = [0.45, 0.35, 0.19, 0.01]
    typical = Typical()
    # Node:   0  1  2  3  4  5  6; the path over token 3 is not accepted.
    tokens = [2, 3, 1, 0, 1, 0, 2]
    parents = [-1, -1, -1, 0, 2, 2, 1]
    draft = Draft(tokens, parents, [1.0] * 7)
    logits = rows(*[law] * 8)
    assert typical.accepted_path(request(), draft, logits) == [2, 5]
    one_deep = Draft(tokens[:3], parents[:3], [1.0] * 3)
    assert typical.accepted_path(request(), one_deep, logits) == [2]


def test_greedy_requests_give_the_greedy_text() -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    for tokens in ([best[0], best[1], 7, 7, 7], [(best[0] + 1) % 8, 1, 1, 1, 1]):
        draft = Draft(tokens, range(-1, 4), [1.0] * 5)
        typical, follow = (
            make_verifier(name).judge([request(0)], [draft], logits)[0]
            for name in ("typical", "follow")
        )
        assert list(typical.path) == list(follow.path)
        assert typical.next_token == follow.next_token


def test_options_widen_and_narrow() -> None:
    law = [0.5, 0.3, 0.2]
    draft = Draft([2], [-1], [1.0])
    strict = make_verifier("typical", epsilon=0.5, delta=1.0)
    [verdict] = strict.judge([request()], [draft], rows(law, law))
    assert list(verdict.path) == []
    assert not strict.lossless
