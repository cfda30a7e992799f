"""The law of what each verifier emits, summed over every draft and every decision, in float64."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import Chance, Toy, outcomes
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.drafters import base
from forerun.drafters.combined import Combined
from forerun.sampling import Place, law
from forerun.verify import Verifier, follow, make_verifier, reference, rejection, typical

Drafter = Callable[[Chance, Sequence[int]], Draft]
PROMPT = [0]
PLAIN = SamplingParams()
EDITED = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.4,
    logit_bias={1: 0.5},
)


# ---- drafters that are enumerated ---------------------------------------------------------------


def sampled_tree(q: Toy, widths: Sequence[int], replace: bool = False) -> Drafter:
    """widths[d] children for every node of depth d, drawn from q; a chain has widths of 1."""

    def draft(chance: Chance, prefix: Sequence[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Tensor] = []

        def grow(parent: int, text: Sequence[int], depth: int) -> None:
            law_V = q.probs(text)
            for _ in range(widths[depth] if depth < len(widths) else 0):
                token = chance.pick(law_V.tolist())
                tokens.append(token)
                parents.append(parent)
                laws.append(law_V)
                grow(len(tokens) - 1, [*text, token], depth + 1)
                if not replace:
                    law_V = law_V.clone()
                    law_V[token] = 0
                    law_V = law_V / law_V.sum()

        grow(-1, prefix, 0)
        return Draft(tokens, parents, [1.0] * len(tokens), torch.stack(laws))

    return draft


def fixed(tokens: Sequence[int], parents: Sequence[int]) -> Drafter:
    return lambda chance, prefix: Draft(tokens, parents, [1.0] * len(tokens))


class Played(base.Drafter):
    """A drafter of this file, as the engine has them."""

    def __init__(self, drafter: Drafter, chance: Chance) -> None:
        self.name = "played"  # type: ignore[misc]
        self.drafter, self.chance = drafter, chance

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self.drafter(self.chance, request.tokens) for request in requests]


def in_turn(first: Drafter, second: Drafter) -> Drafter:
    """Asked as `a+b` is under the rejection rule."""

    def draft(chance: Chance, prefix: Sequence[int]) -> Draft:
        request = Request(0, list(prefix), len(prefix), PLAIN, seed=0)
        both = Combined([Played(first, chance), Played(second, chance)])
        return both.propose([request], [9])[0]

    return draft


def sometimes(drafter: Drafter) -> Drafter:
    return lambda chance, prefix: drafter(chance, prefix) if chance.flip(0.4) else Draft()


FIXED = {
    "nothing": fixed([], []),
    "chain": fixed([1, 2, 0], [-1, 0, 1]),
    "tree": fixed([1, 2, 0, 1, 2], [-1, -1, 0, 0, 1]),
    "duplicates": fixed([1, 1, 0, 2, 2], [-1, -1, 0, 1, 3]),
}


# ---- the machinery ------------------------------------------------------------------------------


class Scripted:
    """The noise of the rejection rule, enumerated."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def accepts(self, chance: float, position: int, sibling: int) -> bool:
        return self.chance.flip(chance)

    def draws(self, probs_V: Tensor, position: int) -> int:
        return self.chance.pick(probs_V.tolist())


def run_all(
    patch: pytest.MonkeyPatch,
    verifier: Verifier,
    p: Toy,
    drafter: Drafter,
    params: SamplingParams = PLAIN,
    keep: Callable[[Draft], Draft] = lambda draft: draft,
) -> list[tuple[float, Draft, Verdict]]:
    """Every outcome of one step: the real `judge`, all noise replaced by enumerated decisions."""
    request = Request(0, list(PROMPT), len(PROMPT), params, seed=0)

    def step(chance: Chance) -> tuple[Draft, Verdict]:
        def choose(
            logits_NV: Tensor, places: Sequence[Place], rows: Sequence[int] | None = None
        ) -> list[int]:
            return [
                chance.pick(law(logits_NV[row], place).tolist())
                for row, place in zip(rows or range(len(places)), places, strict=True)
            ]

        for module in (follow, reference, typical):
            patch.setattr(module, "choose", choose)
        patch.setattr(rejection.Rejection, "noise", lambda self, request: Scripted(chance))
        draft = keep(drafter(chance, PROMPT))
        texts = [reference.spelled(draft, path) for path in all_paths(draft)]
        rows = torch.stack([p.logits([*PROMPT, *text]) for text in texts])
        return draft, verifier.judge([request], [draft], rows)[0]

    return [(weight, *result) for weight, result in outcomes(step)]


def all_paths(draft: Draft) -> list[list[int]]:
    return [[], *(reference.path_to(draft, node) for node in range(len(draft)))]


def plain_law(p: Toy, params: SamplingParams, text: Sequence[int], start: int = 0) -> float:
    """Probability that plain decoding writes text[start:] after the prompt and text[:start]."""
    request = Request(0, list(PROMPT), len(PROMPT), params, seed=0)
    total = 1.0
    for i in range(start, len(text)):
        place = Place(request, text[:i])
        total *= law(p.logits([*PROMPT, *text[:i]]), place)[text[i]].item()
    return total


def largest_error(
    patch: pytest.MonkeyPatch,
    verifier: Verifier,
    p: Toy,
    drafter: Drafter,
    params: SamplingParams = PLAIN,
    length: int = 4,
    keep: Callable[[Draft], Draft] = lambda draft: draft,
) -> float:
    """Compare the law of the first `length` tokens, the step's first, with plain decoding's."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, draft, verdict in run_all(patch, verifier, p, drafter, params, keep):
        head = [*reference.spelled(draft, verdict.path), verdict.next_token]
        emitted[tuple(head)] += weight
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    error = 0.0
    for text in itertools.product(range(p.vocab), repeat=length):
        found = sum(
            weight * plain_law(p, params, text, len(start))
            for start, weight in emitted.items()
            if text[: len(start)] == start
        )
        error = max(error, abs(found - plain_law(p, params, text)))
    return error


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


# ---- lossless -----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
@pytest.mark.parametrize(
    ("vocab", "widths", "replace"),
    [
        (3, [1], False),
        (3, [1, 1, 1], False),
        (5, [1, 1], False),
        (3, [3], False),
        (5, [3], False),
        (3, [2, 2], False),
        (4, [2, 1], False),
        (4, [3], True),
        (3, [2, 2], True),
    ],
)
def test_rejection_is_exact(
    patch: pytest.MonkeyPatch, vocab: int, widths: list[int], replace: bool, params: SamplingParams
) -> None:
    drafter = sampled_tree(Toy(vocab, seed=2, spread=1.5), widths, replace)
    length = len(widths) + 1
    verifier = make_verifier("rejection")
    error = largest_error(patch, verifier, Toy(vocab, seed=1), drafter, params, length)
    assert error < 1e-12


@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
@pytest.mark.parametrize("drafter", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("name", ["follow", "reference", "rejection"])
def test_certain_drafts_are_exact(
    patch: pytest.MonkeyPatch, name: str, drafter: Drafter, params: SamplingParams
) -> None:
    assert largest_error(patch, make_verifier(name), Toy(3, seed=1), drafter, params) < 1e-12


@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
@pytest.mark.parametrize("first", [FIXED["tree"], sampled_tree(Toy(3, seed=3), [2])])
def test_drafters_that_take_turns_are_exact(
    patch: pytest.MonkeyPatch, first: Drafter, params: SamplingParams
) -> None:
    drafter = in_turn(sometimes(first), sampled_tree(Toy(3, seed=2), [1, 1]))
    error = largest_error(patch, make_verifier("rejection"), Toy(3, seed=1), drafter, params)
    assert error < 1e-12


@pytest.mark.parametrize("widths", [[1, 1], [2, 2]])
def test_sampled_drafts_whose_law_was_lost_are_exact(
    patch: pytest.MonkeyPatch, widths: list[int]
) -> None:
    drafter = sampled_tree(Toy(3, seed=2), widths)

    def forget(draft: Draft) -> Draft:
        return Draft(draft.tokens, draft.parents, draft.survival)

    for name in ("follow", "rejection"):
        verifier = make_verifier(name)
        assert largest_error(patch, verifier, Toy(3, seed=1), drafter, keep=forget) < 1e-12


# ---- the same test notices what is wrong --------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "the residual is p": ("residual", lambda p_V, q_V: p_V),
    "the residual is |p - q|": (
        "residual",
        lambda p_V, q_V: (p_V - q_V).abs() / (p_V - q_V).abs().sum(),
    ),
    "acceptance is p": ("acceptance", lambda p_V, q_V, token: p_V[token].item()),
}


@pytest.mark.parametrize("widths", [[1, 1], [2, 2]])
@pytest.mark.parametrize(("function", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_noticed(
    patch: pytest.MonkeyPatch, function: str, wrong: Callable[..., Any], widths: list[int]
) -> None:
    patch.setattr(rejection, function, wrong)
    drafter = sampled_tree(Toy(3, seed=2), widths)
    verifier = make_verifier("rejection")
    assert largest_error(patch, verifier, Toy(3, seed=1), drafter, length=3) > 1e-3


def test_siblings_without_replacement_that_hide_it_are_noticed(patch: pytest.MonkeyPatch) -> None:
    q = Toy(3, seed=2)
    plain = sampled_tree(q, [2])

    def hiding(chance: Chance, prefix: Sequence[int]) -> Draft:
        draft = plain(chance, prefix)
        return Draft(draft.tokens, draft.parents, draft.survival, q.probs(prefix).expand(2, -1))

    verifier = make_verifier("rejection")
    assert largest_error(patch, verifier, Toy(3, seed=1), hiding, length=2) > 1e-3


def test_turns_that_hang_on_what_was_drawn_are_noticed(patch: pytest.MonkeyPatch) -> None:
    drawn = sampled_tree(Toy(3, seed=3), [1])

    def picky(chance: Chance, prefix: Sequence[int]) -> Draft:
        draft = drawn(chance, prefix)
        return draft if draft.tokens[0] == 1 else Draft()

    drafter = in_turn(picky, sampled_tree(Toy(3, seed=2), [1]))
    error = largest_error(patch, make_verifier("rejection"), Toy(3, seed=1), drafter, length=2)
    assert error > 1e-3


def test_typical_is_lossy(patch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier("typical")
    assert largest_error(patch, verifier, Toy(3, seed=1), FIXED["tree"]) > 1e-2


# ---- figures worked out by hand (exact rational arithmetic) -------------------------------------


class Constant(Toy):
    """The same law everywhere."""

    def __init__(self, *probs: float) -> None:
        super().__init__(len(probs), seed=0)
        self.law = torch.tensor(probs, dtype=torch.float64)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        return self.law.log()


P = Constant(0.5, 0.3, 0.2)
Q = Constant(0.2, 0.5, 0.3)


def expected_path(
    patch: pytest.MonkeyPatch, p: Toy, drafter: Drafter, verifier: str = "rejection"
) -> float:
    results = run_all(patch, make_verifier(verifier), p, drafter)
    return sum(weight * len(verdict.path) for weight, _, verdict in results)


def test_acceptance_and_residual() -> None:
    p_V, q_V = P.probs(()), Q.probs(())
    accepted = sum(q_V[x].item() * rejection.acceptance(p_V, q_V, x) for x in range(3))
    assert accepted == pytest.approx(0.7, abs=1e-12)
    assert rejection.residual(p_V, q_V).tolist() == [1, 0, 0]
    assert rejection.residual(p_V, p_V).tolist() == p_V.tolist()
    assert rejection.acceptance(p_V, torch.tensor([0.0, 0.5, 0.5]), 0) == 0
    assert rejection.acceptance(p_V, torch.tensor([torch.nan, 0.5, 0.5]), 0) == 0


def test_expected_acceptance(patch: pytest.MonkeyPatch) -> None:
    one, two = [1], [2]
    assert expected_path(patch, P, sampled_tree(Q, one)) == pytest.approx(0.7, abs=1e-12)
    independent = sampled_tree(Q, two, replace=True)
    assert expected_path(patch, P, independent) == pytest.approx(0.76, abs=1e-12)
    assert expected_path(patch, P, sampled_tree(Q, two)) == pytest.approx(283 / 350, abs=1e-12)
    top_two = fixed([1, 2], [-1, -1])
    assert expected_path(patch, P, top_two, "follow") == pytest.approx(0.5, abs=1e-12)
    binary = sampled_tree(Constant(2 / 3, 1 / 3), [1, 1])
    accepted = expected_path(patch, Constant(1 / 3, 2 / 3), binary)
    assert accepted == pytest.approx(10 / 9, abs=1e-12)


def test_dropping_a_sampled_token_for_its_own_value_biases(patch: pytest.MonkeyPatch) -> None:
    def drop_unlikely(draft: Draft) -> Draft:
        assert draft.probs_NV is not None
        unlikely = draft.probs_NV[0, draft.tokens[0]] < 0.3 - 1e-9
        return Draft() if unlikely else draft

    verifier = make_verifier("rejection")
    emitted = [0.0, 0.0, 0.0]
    drafter = sampled_tree(Q, [1])
    for weight, draft, verdict in run_all(patch, verifier, P, drafter, keep=drop_unlikely):
        text = [*reference.spelled(draft, verdict.path), verdict.next_token]
        emitted[text[0]] += weight
    assert emitted == pytest.approx([0.40, 0.36, 0.24], abs=1e-12)
