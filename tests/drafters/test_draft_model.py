from __future__ import annotations

import random

import pytest
import torch

from drafting import loaded, make, propose, request
from fakes import FakeTarget, greedy_path, random_rule
from forerun import sampling
from forerun.core import Request
from forerun.drafters import Drafter, autoregressive
from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.sampling import Place, Stream
from tiny import tiny_tokenizer

RULE = random_rule(memory=None, scale=4.0)  # of all tokens: a wrong slot anywhere is a wrong answer


def drafter_of(
    draft: FakeTarget, options: str = "k=4,min_prob=0", *, slots: int = 256, **context: object
) -> Drafter:
    target = FakeTarget(RULE)
    return make(
        f"model:draft,{options}",
        target,
        store=target.new_store(slots),
        load=lambda name: loaded(draft),
        **context,
    )


def test_it_proposes_what_the_draft_model_says() -> None:
    draft = propose(drafter_of(FakeTarget(RULE)), request([1, 2, 3]))
    assert draft.tokens == greedy_path(RULE, [1, 2, 3], 4)
    assert draft.is_chain
    assert draft.probs_NV is None


def test_survival_is_the_models_own_probability_at_first() -> None:
    draft = propose(drafter_of(FakeTarget(RULE)), request([1, 2, 3]))
    expected, path = 1.0, [1, 2, 3]
    for token, survival in zip(draft.tokens, draft.survival, strict=True):
        expected *= min(0.99, float(RULE(tuple(path)).softmax(-1)[token]))
        assert survival == pytest.approx(expected)
        path.append(token)


@pytest.mark.parametrize("seed", range(4))
def test_its_cache_follows_whatever_was_committed(seed: int) -> None:
    """Full, partial and no acceptance, and steps in which it was not asked."""
    dice = random.Random(seed)
    drafter = drafter_of(FakeTarget(RULE))
    asked = request([1, 2, 3])
    for _ in range(25):
        draft = propose(drafter, asked, budget=dice.randrange(1, 6))
        assert draft.tokens == greedy_path(RULE, asked.tokens, len(draft))
        asked.tokens += draft.tokens[: dice.randrange(len(draft) + 1)]
        asked.tokens.append(dice.randrange(16))
        drafter.observe([asked], [], ())
        if dice.random() < 0.3:
            asked.tokens += [dice.randrange(16) for _ in range(dice.randrange(8))]


def test_after_full_acceptance_the_last_drafted_token_is_fed_too() -> None:
    draft_model = FakeTarget(RULE)
    drafter = drafter_of(draft_model)
    asked = request([1, 2, 3])
    asked.tokens += [*propose(drafter, asked).tokens, 5]
    draft_model.passes.clear()
    propose(drafter, asked)
    assert draft_model.passes == [2, 1, 1, 1]


def test_a_batch_takes_one_pass_per_token() -> None:
    draft_model = FakeTarget(RULE)
    drafter = drafter_of(draft_model)
    batch = [request([id, 2, 3], id=id) for id in range(3)]
    drafts = drafter.propose(batch, [4, 0, 2])
    assert draft_model.passes == [6, 2, 1, 1]
    assert [list(draft.tokens) for draft in drafts] == [
        greedy_path(RULE, batch[0].tokens, 4),
        [],
        greedy_path(RULE, batch[2].tokens, 2),
    ]


def test_long_prompts_are_fed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoregressive, "CHUNK", 8)
    draft_model = FakeTarget(RULE)
    prompt = [i % 16 for i in range(30)]
    draft = propose(drafter_of(draft_model), request(prompt))
    assert draft_model.passes == [8, 8, 8, 6, 1, 1, 1]
    assert draft.tokens == greedy_path(RULE, prompt, 4)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "logit_bias": {3: 1.5}}


def test_with_coupled_noise_a_perfect_draft_is_what_the_target_will_choose() -> None:
    asked = request([1, 2, 3], **SAMPLED)
    draft = propose(drafter_of(FakeTarget(RULE)), asked)
    plain: list[int] = []
    for _ in range(4):
        logits_NV = RULE((*asked.tokens, *plain))[None]
        plain += sampling.choose(logits_NV, [Place(asked, plain)])
    assert draft.tokens == plain
    assert plain != greedy_path(RULE, asked.tokens, 4)
    assert draft.probs_NV is None


def test_independent_noise_draws_from_the_law_it_returns() -> None:
    drafter = drafter_of(FakeTarget(RULE), independent_noise=True)
    asked, greedy = request([1, 2, 3], **SAMPLED), request([1, 2, 3], id=1)
    asked.params = asked.params.model_copy(update={"temperature": 3.0, "top_p": 1.0})
    draft, sure = drafter.propose([asked, greedy], [3, 3])
    assert sure.probs_NV is None
    assert sure.tokens == greedy_path(RULE, greedy.tokens, 3)
    assert draft.probs_NV is not None
    assert draft.probs_NV.shape == (3, 16)
    for depth, token in enumerate(draft.tokens):
        place = Place(asked, draft.tokens[:depth])
        law_V = sampling.law(RULE((*asked.tokens, *place.drafted)), place)
        assert torch.equal(draft.probs_NV[depth], law_V)
        assert token == sampling.draw(law_V, asked.seed, place.position, Stream.DRAFT)


@pytest.mark.parametrize("independent", [False, True])
def test_it_stops_behind_an_unlikely_token(independent: bool) -> None:
    """The unlikely token itself stays: dropping it for its value would bias the rejection rule."""
    flat = FakeTarget(lambda path: torch.zeros(16))
    drafter = drafter_of(flat, "k=4,min_prob=0.3", independent_noise=independent)
    assert len(propose(drafter, request([1, 2], temperature=1.0))) == 1
    sure = FakeTarget(lambda path: torch.eye(16)[5] * 50)
    assert len(propose(drafter_of(sure, "k=4,min_prob=0.3"), request([1, 2]))) == 4


def test_it_keeps_its_limits() -> None:
    tokens = [1, 2, 3]
    path = greedy_path(RULE, tokens, 4)
    assert len(propose(drafter_of(FakeTarget(RULE)), request(tokens), budget=2)) == 2
    assert len(propose(drafter_of(FakeTarget(RULE)), request(tokens, max_tokens=3))) == 2
    assert not propose(drafter_of(FakeTarget(RULE)), request(tokens, max_tokens=1)).tokens
    assert propose(drafter_of(FakeTarget(RULE)), request(tokens, stop=[path[1]])).tokens == path[:2]


def test_a_request_that_outgrew_the_draft_model_goes_on_without() -> None:
    short = FakeTarget(RULE, max_length=10)
    for length, drafted in ((5, 4), (8, 2), (9, 1), (10, 0), (11, 0)):
        assert len(propose(drafter_of(short), request([1] * length))) == drafted


def test_a_request_that_does_not_fit_goes_on_without() -> None:
    draft_model = FakeTarget(RULE)
    drafter = drafter_of(draft_model, slots=128)
    large, small = request([1] * 140, id=1), request([2] * 20, id=2)
    drafts = drafter.propose([large, small], [4, 4])
    assert [len(draft) for draft in drafts] == [0, 4]
    store = drafter._store  # type: ignore[attr-defined]
    assert len(store.spans) == 1
    drafter.release(large)
    drafter.release(small)
    assert store.free_slots == 128


def test_a_request_that_no_longer_fits_gives_its_place_back() -> None:
    drafter = drafter_of(FakeTarget(RULE), slots=128)
    asked = request([1] * 100, max_tokens=1000)
    assert propose(drafter, asked).tokens
    asked.tokens += [2] * 30
    assert not propose(drafter, asked).tokens
    assert drafter._store.free_slots == 128  # type: ignore[attr-defined]


def test_a_released_request_starts_anew() -> None:
    draft_model = FakeTarget(RULE)
    drafter = drafter_of(draft_model)
    asked = request([1, 2, 3])
    first = propose(drafter, asked)
    drafter.release(asked)
    draft_model.passes.clear()
    assert propose(drafter, asked).tokens == first.tokens
    assert draft_model.passes[0] == 3


def padded(size: int) -> FakeTarget:
    """A draft model whose favourite token is its last one."""
    favour = torch.arange(size) * 1.0
    return FakeTarget(lambda path: favour)


@pytest.mark.parametrize("size", [12, 16, 24])
def test_vocabularies_may_be_padded_differently(size: int) -> None:
    drafter = drafter_of(
        padded(size), tokenizer=Tokenizer(tiny_tokenizer()), independent_noise=True
    )
    draft = propose(drafter, request([1], temperature=1.0, logit_bias={15: 0.1}))
    assert draft.probs_NV is not None
    assert draft.probs_NV.shape == (4, 16)
    assert max(draft.tokens) < min(size, 16)
    assert max(propose(drafter, request([1], id=2)).tokens) == min(size, 16) - 1


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"another vocabulary than 'fake'; choose a smaller"):
        drafter_of(FakeTarget(RULE), tokenizer=Tokenizer(tiny_tokenizer(extra=3)))
    with pytest.raises(ConfigError, match="another vocabulary"):
        drafter_of(padded(12))


def test_an_interrupted_draft_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_model = FakeTarget(RULE)
    drafter = drafter_of(draft_model)
    asked: Request = request([1, 2, 3])
    asked.tokens += [*propose(drafter, asked).tokens[:2], 9]
    forward = draft_model.forward

    def interrupted(*args: object, **values: object) -> None:
        if draft_model.passes.append(0) or len(draft_model.passes) > 6:
            raise KeyboardInterrupt
        return forward(*args, **values)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(draft_model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        propose(drafter, asked)
    monkeypatch.undo()
    asked.tokens.append(11)
    assert propose(drafter, asked).tokens == greedy_path(RULE, asked.tokens, 4)
