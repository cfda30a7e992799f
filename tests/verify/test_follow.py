from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import Toy
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.models import kernels
from forerun.sampling import Place, choose
from forerun.verify import make_verifier
from forerun.verify.reference import path_to, spelled

VOCAB = 6
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.7, "presence_penalty": 0.5},
    {"frequency_penalty": 1.0, "top_k": 4},
    {"logit_bias": {0: 1.0, 3: -2.0}, "min_p": 0.05},
    {"temperature": 0, "min_tokens": 6},
]


def make_request(i: int, tokens: int = 1) -> Request:
    params = SamplingParams(**PARAMS[i % len(PARAMS)], max_tokens=64)
    return Request(i, [i % VOCAB] * tokens, tokens, params, seed=i, stop_ids=frozenset({2}))


def random_tree(dice: random.Random, nodes: int) -> Draft:
    """Any parents; with few tokens and many nodes, siblings repeat."""
    parents = [dice.randrange(-1, node) for node in range(nodes)]
    return Draft([dice.randrange(VOCAB) for _ in parents], parents, [1.0] * nodes)


def slipping_chain(dice: random.Random, text: list[int]) -> Draft:
    """The text with a wrong token here and there."""
    tokens = [token if dice.random() < 0.7 else dice.randrange(VOCAB) for token in text]
    return Draft(tokens, range(-1, len(tokens) - 1), [1.0] * len(tokens))


def logits(model: Toy, request: Request, draft: Draft) -> Tensor:
    texts = [[], *(spelled(draft, path_to(draft, node)) for node in range(len(draft)))]
    return torch.stack([model.logits([*request.tokens, *text]) for text in texts]).float()


def plain(model: Toy, request: Request, count: int) -> list[int]:
    """The request's next tokens without any draft."""
    tokens: list[int] = []
    for _ in range(count):
        rows = model.logits([*request.tokens, *tokens]).float()[None]
        tokens += choose(rows, [Place(request, tokens)])
    return tokens


def judge(model: Toy, requests: list[Request], drafts: list[Draft], name: str) -> list[Verdict]:
    rows = torch.cat([logits(model, *pair) for pair in zip(requests, drafts, strict=True)])
    return make_verifier(name).judge(requests, drafts, rows)


def as_pairs(verdicts: list[Verdict]) -> list[tuple[list[int], int]]:
    return [(list(verdict.path), verdict.next_token) for verdict in verdicts]


@pytest.mark.parametrize("chains", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("name", ["follow", "reference", "rejection"])
def test_decoding_with_any_draft_gives_the_plain_text(name: str, chains: bool) -> None:
    dice = random.Random(5)
    model = Toy(VOCAB, seed=3, spread=2.0)
    requests = [make_request(i, tokens=1 + i % 3) for i in range(2 * len(PARAMS))]
    expected = [plain(model, request, 20) for request in requests]
    accepted = 0
    while any(request.output_length < 20 for request in requests):
        if chains:
            drafts = [
                slipping_chain(dice, text[request.output_length :][: dice.randrange(6)])
                for request, text in zip(requests, expected, strict=True)
            ]
        else:
            drafts = [random_tree(dice, dice.randrange(20)) for _ in requests]
        verdicts = judge(model, requests, drafts, name)
        for request, draft, verdict in zip(requests, drafts, verdicts, strict=True):
            request.tokens += [*spelled(draft, verdict.path), verdict.next_token]
            accepted += len(verdict.path)
    assert [request.output[:20] for request in requests] == expected
    assert accepted > 30  # the equality was not had by rejecting everything


def test_agrees_with_the_reference_on_every_tree() -> None:
    dice = random.Random(1)
    model = Toy(VOCAB, seed=4)
    for _ in range(30):
        requests = [make_request(dice.randrange(99), dice.randrange(1, 4)) for _ in range(5)]
        drafts = [random_tree(dice, dice.randrange(25)) for _ in requests]
        followed = judge(model, requests, drafts, "follow")
        assert as_pairs(followed) == as_pairs(judge(model, requests, drafts, "reference"))


@pytest.mark.parametrize("i", range(len(PARAMS)))
def test_right_and_wrong_drafts(i: int) -> None:
    model = Toy(VOCAB, seed=6)
    request = make_request(i)
    text = plain(model, request, 7)
    right = Draft(text[:6], range(-1, 5), [1.0] * 6)
    assert as_pairs(judge(model, [request], [right], "follow")) == [([0, 1, 2, 3, 4, 5], text[6])]
    wrong = Draft([(text[0] + 1) % VOCAB, *text[1:6]], range(-1, 5), [1.0] * 6)
    assert as_pairs(judge(model, [request], [wrong], "follow")) == [([], text[0])]
    assert as_pairs(judge(model, [request], [Draft()], "follow")) == [([], text[0])]


@pytest.mark.parametrize("i", range(len(PARAMS)))
def test_duplicate_siblings_lose_nothing(i: int) -> None:
    model = Toy(VOCAB, seed=7)
    request = make_request(i)
    a, b, c, d = plain(model, request, 4)
    # Three nodes spell `a`; `b` hangs from the second, and twice; `c` from the second of these.
    tree = Draft([a, a, a, b, b, c], [-1, -1, -1, 1, 1, 4], [1.0] * 6)
    assert as_pairs(judge(model, [request], [tree], "follow")) == [([1, 4, 5], d)]
    # The same texts hang from different nodes: the path has to be one of the tree.
    tree = Draft([a, b, a, b, c], [-1, 0, -1, 2, 3], [1.0] * 5)
    assert as_pairs(judge(model, [request], [tree], "follow")) == [([2, 3, 4], d)]


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
@pytest.mark.parametrize("vocab", [3, 64, 65, 700])
def test_compiled_walks_are_those_of_python(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(vocab)
    torch.manual_seed(vocab)
    requests = [Request(i, [0], 1, SamplingParams(temperature=0), i) for i in range(40)]
    drafts = [random_tree(dice, dice.randrange(25)) for _ in requests]
    rows = sum(1 + len(draft) for draft in drafts)
    logits_NV = torch.randint(0, 9, (rows, vocab)).float()  # with ties
    logits_NV[:, 6:].clamp_(max=5)  # so that drafted tokens are chosen, too
    found = [make_verifier("follow").judge(requests, drafts, logits_NV)]
    monkeypatch.setattr("forerun.verify.follow.kernels.library", lambda: None)
    found.append(make_verifier("follow").judge(requests, drafts, logits_NV))
    assert as_pairs(found[0]) == as_pairs(found[1])
    assert sum(len(verdict.path) for verdict in found[0]) > 8


def test_no_requests() -> None:
    for name in ("follow", "rejection", "typical", "reference"):
        assert make_verifier(name).judge([], [], torch.zeros(0, VOCAB)) == []
