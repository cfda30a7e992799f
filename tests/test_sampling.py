from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import sampling
from forerun.core import Request, SamplingParams
from forerun.errors import ConfigError
from forerun.models import kernels
from forerun.sampling import Place, Stream, argmax, choose, draw, gumbel, law, logprobs, uniform

PROMPT = [3, 1, 4, 1]
OUTPUT = [5, 9, 2, 6, 5]

# Every parameter that shapes the law, alone and together.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "truncated": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {0: 2.0, 7: -3.5}},
    "min_tokens": {"min_tokens": 9},
    "greedy, edited": {"temperature": 0, "repetition_penalty": 1.8, "frequency_penalty": 0.6},
    "greedy, min_tokens": {"temperature": 0, "min_tokens": 9},
    "all": {
        "temperature": 0.9,
        "top_k": 15,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {2: 1.0, 11: -math.inf},
        "min_tokens": 9,
    },
}


def request(seed: int = 0, tokens: Sequence[int] = (*PROMPT, *OUTPUT), **params: Any) -> Request:
    params.setdefault("max_tokens", 64)
    stop_ids = frozenset({5, 8, 10_000})
    return Request(0, list(tokens), len(PROMPT), SamplingParams(**params), seed, stop_ids)


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, vocab, generator=generator)


def literal_law(logits: list[float], place: Place) -> list[float]:
    """The documented order, token by token, in Python floats; no ties."""
    params = place.request.params
    tokens = [*place.request.tokens, *place.drafted]
    counts = Counter(tokens[place.request.prompt_length :])
    x = list(logits)
    for token in range(len(x)):
        if sum(counts.values()) < params.min_tokens and token in place.request.stop_ids:
            x[token] = -math.inf
        x[token] += params.logit_bias.get(token, 0)
        if token in tokens:
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * counts[token]
        x[token] -= params.presence_penalty * (counts[token] > 0)
    largest = max(x)
    if params.temperature == 0:
        return [float(value == largest) for value in x]
    weights = [math.exp((value - largest) / params.temperature) for value in x]
    weights = [w if w >= params.min_p else 0.0 for w in weights]  # the largest weighs 1
    if params.top_k > 0:
        smallest = sorted(weights)[-min(params.top_k, len(weights))]
        weights = [w if w >= smallest else 0.0 for w in weights]
    total = sum(weights)
    probs = [w / total for w in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if mass < params.top_p:
            kept.add(token)
        mass += probs[token]
    total = sum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


# ---- the law ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_law_is_the_documented_one(params: dict[str, Any]) -> None:
    for seed in range(20):
        logits_V = random_logits(1, 20, seed)[0].double()
        place = Place(request(**params), [0, 7])
        expected = literal_law(logits_V.tolist(), place)
        exact_V = law(logits_V, place)
        assert exact_V.dtype == torch.float64
        assert exact_V.tolist() == pytest.approx(expected, abs=1e-12)
        single_V = law(logits_V.float(), place)
        assert single_V.dtype == torch.float32
        assert single_V.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.3},
        {"top_p": 0.99},
        {"min_p": 0.3},
        {"min_p": 0.001, "top_p": 0.9},
        {"min_p": 0.97, "top_p": 0.5},
        {"top_k": 300},
        {"top_k": 4999, "top_p": 0.97},
        {"top_k": 5000},
        {"top_k": 9999},
    ],
)
def test_the_law_of_a_large_vocabulary_needs_no_sort(params: dict[str, Any], spread: float) -> None:
    logits_V = random_logits(1, 5000, 7, spread)[0].double()
    place = Place(request(**params))
    expected = literal_law(logits_V.tolist(), place)
    assert law(logits_V, place).tolist() == pytest.approx(expected, abs=1e-12)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits_V = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0, -math.inf])
    for params in ({"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.1}):
        kept = law(logits_V, Place(request(**params))).nonzero().squeeze(1)
        assert kept.tolist() == [0, 1, 2, 3], params
    many_V = torch.zeros(1000)  # more than fit into the first look
    assert (law(many_V, Place(request(top_k=2))) == 1 / 1000).all()


def test_extremes_stay_finite() -> None:
    logits_V = random_logits(1, 3000, spread=30)[0]
    [top] = argmax(logits_V[None])
    for params in (
        {"temperature": 1e-40},
        {"temperature": 1e-3, "top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0},
    ):
        place = Place(request(**params))
        probs_V = law(logits_V, place)
        assert probs_V[top] == 1, params
        assert probs_V.sum() == 1, params
        assert choose(logits_V[None], [place]) == [top]
    flat_V = law(logits_V, Place(request(temperature=1e9)))
    assert flat_V.tolist() == pytest.approx([1 / 3000] * 3000, rel=1e-4)


def test_min_tokens_forbids_stop_ids_until_reached() -> None:
    logits_V = torch.zeros(20)
    logits_V[5] = 9
    missing = len(OUTPUT) + 2
    place = request(temperature=0, min_tokens=missing)
    assert choose(logits_V[None], [Place(place, [1])]) != [5]
    assert choose(logits_V[None], [Place(place, [1, 1])]) == [5]
    probs_V = law(logits_V, Place(request(min_tokens=missing), [1]))
    assert probs_V[[5, 8]].tolist() == [0, 0]


def test_logits_are_left_as_they_are() -> None:
    logits_NV = random_logits(1, 20)
    before = logits_NV.clone()
    for params in PARAMS.values():
        choose(logits_NV, [Place(request(**params))])
        law(logits_NV[0], Place(request(**params)))
    logprobs(logits_NV[0], 0, 3)
    assert torch.equal(logits_NV, before)


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_drafted_and_committed_tokens_weigh_the_same(params: dict[str, Any]) -> None:
    drafted = [7, 2, 2]
    for seed in range(30):
        logits_NV = random_logits(1, 20, seed)
        committed = request(seed, [*PROMPT, *OUTPUT, *drafted], **params)
        ahead = Place(request(seed, **params), drafted)
        assert choose(logits_NV, [ahead]) == choose(logits_NV, [Place(committed)])
        assert torch.equal(law(logits_NV[0], ahead), law(logits_NV[0], Place(committed)))


def test_a_row_does_not_depend_on_the_others() -> None:
    for vocab in (20, 6001):
        logits_NV = random_logits(3 * len(PARAMS), vocab)
        places = [
            Place(request(seed, **params), [seed])
            for seed, params in itertools.product(range(3), PARAMS.values())
        ]
        together = choose(logits_NV, places)
        alone = [choose(logits_NV[i : i + 1].clone(), [place])[0] for i, place in enumerate(places)]
        assert together == alone
        backwards = range(len(places))[::-1]
        assert choose(logits_NV.flip(0), places[::-1]) == together[::-1]
        assert choose(logits_NV, places[::-1], backwards) == together[::-1]


def test_the_choice_is_the_largest_log_law_plus_noise() -> None:
    for seed, params in itertools.product(range(10), PARAMS.values()):
        logits_V = random_logits(1, 20, seed)[0]
        place = Place(request(seed, **params), [0])
        noise_V = gumbel(seed, place.position, torch.arange(20))
        greedy = place.request.params.greedy
        scores_V = law(logits_V, place).log() + (0 if greedy else noise_V)
        assert choose(logits_V[None], [place]) == [scores_V.argmax().item()]


def test_greedy_ties_go_to_the_lowest_token() -> None:
    logits_NV = torch.zeros(4, 3000)
    logits_NV[:, [700, 77, 2900]] = 1
    greedy = Place(request(temperature=0))
    edited = Place(request(temperature=0, presence_penalty=1.0))
    assert choose(logits_NV, [greedy] * 4) == [77] * 4
    assert choose(logits_NV, [greedy, edited, greedy, edited]) == [77] * 4
    assert law(logits_NV[0], greedy).argmax() == 77
    assert argmax(logits_NV) == [77] * 4


def test_sampled_ties_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "gumbel", lambda seed, position, ids_N, stream: ids_N * 0.0)
    logits_NV = torch.zeros(1, 3000, dtype=torch.float64)  # not compiled, where noise is what it is
    logits_NV[:, [2900, 700, 77, 1500]] = 1
    cases: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.001}, {"min_p": 0.9}]
    for params in cases:
        assert choose(logits_NV, [Place(request(**params))]) == [77], params


@pytest.mark.parametrize("vocab", [15, 64, 65, 6001])
def test_compiled_and_general_choices_are_the_same(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels.library() is None:
        pytest.skip("no compiled kernels")
    more: list[dict[str, Any]] = [
        {"top_p": 1e-9},
        {"top_k": vocab - 1},
        {"top_k": 70},
        {"temperature": 3.0, "top_p": 0.999},  # a nucleus of thousands
        {"temperature": 1e9, "top_k": 2000, "top_p": 0.5},
        {"temperature": 1e-40},
    ]
    sampled = [params for params in (*PARAMS.values(), *more) if params.get("temperature") != 0]
    pairs = list(itertools.product(range(8), sampled))
    places = [Place(request(seed, range(9), **params)) for seed, params in pairs]
    logits_NV = random_logits(len(places), vocab, spread=4.0)
    logits_NV[1::2] = (8 * logits_NV[1::2]).round() / 8  # many ties
    compiled = choose(logits_NV, places)
    monkeypatch.setattr(kernels, "library", lambda: None)
    general = choose(logits_NV, places)
    assert general == compiled
    others = [Place(request(seed + 1, range(9), **params)) for seed, params in pairs]
    assert choose(logits_NV, others) != compiled, "the noise decides"


def test_choices_over_seeds_follow_the_law() -> None:
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
    draws = 4000
    cases: list[dict[str, Any]] = [{}, {"temperature": 1.7}, {"top_k": 3, "temperature": 0.7}]
    for params in cases:
        places = [Place(request(seed, **params)) for seed in range(draws)]
        counts = Counter(choose(logits_V.expand(draws, -1), places))
        for token, p in enumerate(law(logits_V, places[0]).tolist()):
            bound = 5 * math.sqrt(draws * p * (1 - p))
            assert abs(counts[token] - draws * p) <= bound, (params, token)


def test_draws_over_positions_follow_the_law_in_every_stream() -> None:
    probs_V = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    draws = 3000
    drawn = {
        stream: [draw(probs_V, 11, position, stream) for position in range(draws)]
        for stream in Stream
    }
    for stream, tokens in drawn.items():
        counts = Counter(tokens)
        for token, p in enumerate(probs_V.tolist()):
            assert abs(counts[token] - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)), stream
    # Independent streams agree as often as chance has it.
    agreement = probs_V.square().sum().item()
    bound = 5 * math.sqrt(draws * agreement * (1 - agreement))
    for one, other in itertools.combinations(Stream, 2):
        same = sum(a == b for a, b in zip(drawn[one], drawn[other], strict=True))
        assert abs(same - draws * agreement) <= bound, (one, other)


# ---- the noise ----------------------------------------------------------------------------------


def test_the_hash_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    hashed = sampling._hash_N(1234567, torch.arange(1, 5))
    assert [value % 2**64 for value in hashed.tolist()] == published
    assert [sampling._mix(1234567 + i * sampling._STEP) for i in range(1, 5)] == published


def correlation(x_N: Tensor, y_N: Tensor) -> float:
    return torch.corrcoef(torch.stack([x_N.double(), y_N.double()]))[0, 1].item()


def test_noise_is_gumbel_and_independent() -> None:
    ids = torch.arange(40_000)
    noise_N = gumbel(1, 2, ids).double()
    deviation = 1 / math.sqrt(len(ids))
    assert noise_N.mean().item() == pytest.approx(0.5772, abs=5 * 1.2825 * deviation)
    assert noise_N.var().item() == pytest.approx(math.pi**2 / 6, rel=0.05)
    counts = (-(-noise_N).exp()).exp().histc(64, 0, 1)  # uniform if the noise is Gumbel
    chi_square = ((counts - 625) ** 2 / 625).sum().item()
    assert 20 < chi_square < 130  # 63 degrees of freedom: 63 +- 11
    neighbours = [gumbel(1, 3, ids), gumbel(2, 2, ids), gumbel(2, 1, ids), gumbel(1, 2, ids + 1)]
    streams = [gumbel(1, 2, ids, stream) for stream in Stream if stream != Stream.TARGET]
    for other_N in neighbours + streams:
        assert abs(correlation(noise_N, other_N)) < 5 * deviation


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    some, all_ids = torch.tensor([5, 49_151, 0]), torch.arange(49_152)
    for seed in (0, -1, 2**63, 10**30):
        assert torch.equal(gumbel(seed, 9, some), gumbel(seed, 9, all_ids)[some])
        assert gumbel(seed, 9, all_ids).isfinite().all()
    assert not torch.equal(gumbel(0, 9, some), gumbel(-1, 9, some))


def test_uniform_numbers() -> None:
    numbers = torch.tensor(
        [[uniform(4, position, Stream.ACCEPT, i) for i in range(2)] for position in range(5000)]
    )
    assert 0 < numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert numbers.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=5 * 0.2887 / 70)
    assert abs(correlation(*numbers.T)) < 5 / 70


# ---- what is reported and refused ---------------------------------------------------------------


def test_logprobs_come_from_the_unmodified_logits() -> None:
    logits_V = random_logits(1, 20)[0]
    expected = logits_V.log_softmax(-1)
    result = logprobs(logits_V, 4, 3)
    assert result.chosen == expected[4].item()
    assert list(result.top) == expected.argsort(descending=True)[:3].tolist()
    assert all(value == expected[token].item() for token, value in result.top.items())
    assert logprobs(logits_V, 4, 0).top == {}
    assert len(logprobs(logits_V[:5], 4, 20).top) == 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {20: 1.0}}, "logit_bias names token 20; use ids from 0 to 19"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
        ({"stop_token_ids": [3, 99]}, "stop_token_ids names token 99"),
        ({"logit_bias": {2: math.inf}}, "logit_bias of token 2 is inf"),
        ({"logit_bias": {2: math.nan}}, "logit_bias of token 2 is nan"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling.check_vocabulary(SamplingParams(**params), 20)


def test_tokens_of_the_vocabulary_are_accepted() -> None:
    params = SamplingParams(logit_bias={0: -math.inf, 19: 5.0}, stop_token_ids=(19,))
    sampling.check_vocabulary(params, 20)
