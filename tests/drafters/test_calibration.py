from __future__ import annotations

import random
from array import array

import pytest
import torch

from drafting import request
from forerun.drafters.calibration import MOST, Calibration
from forerun.drafters.tree import chain
from forerun.models import kernels
from forerun.models.heads.rounds import Tree


def teach(
    calibration: Calibration, belief: float, chance: float, decisions: int, id: int = 0
) -> None:
    """Propose chains of three with one belief, of which each token is right with one chance."""
    dice = random.Random(1)
    asked = request([0], id=id)
    for _ in range(decisions):
        calibration.propose(asked, [1, 1, 1], chain(3), [belief] * 3)
        asked.tokens += [1 if dice.random() < chance else 0 for _ in range(3)]
        calibration.settle(asked)


def test_beliefs_count_until_something_is_known() -> None:
    draft = Calibration().propose(request([0]), [5, 6, 7], [-1, -1, 0], [0.5, 0.25, 0.5])
    assert draft.survival == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(("belief", "chance"), [(0.9, 0.3), (0.2, 0.6), (0.5, 0.5)])
def test_survival_becomes_what_is_observed(belief: float, chance: float) -> None:
    calibration = Calibration()
    teach(calibration, belief, chance, 500)
    calibration.forget(request([0]))
    new = request([0], id=1)
    assert calibration.estimate(new, belief) == pytest.approx(chance, abs=0.07)
    # Other beliefs were not tried.
    assert calibration.estimate(new, 0.7) == 0.7


def test_each_request_has_its_own_luck() -> None:
    calibration = Calibration()
    teach(calibration, 0.5, 0.9, 30, id=1)
    teach(calibration, 0.5, 0.1, 30, id=2)
    lucky, unlucky = (calibration.estimate(request([0], id=id), 0.5) for id in (1, 2))
    assert lucky > 0.7
    assert unlucky < 0.3


def test_what_is_not_proposed_can_still_prove_its_worth() -> None:
    calibration = Calibration()
    asked = request([0])
    for _ in range(40):
        draft = calibration.propose(asked, [1], [-1], [0.04], min_prob=0.05)
        asked.tokens.append(1)
        calibration.settle(asked)
    assert len(draft) == 1


def test_many_estimates_at_once_are_the_same() -> None:
    calibration = Calibration()
    teach(calibration, 0.5, 0.9, 30, id=1)
    teach(calibration, 0.97, 0.3, 30, id=2)
    requests = [request([0], id=id) for id in (1, 2, 3)]
    beliefs_BN = torch.tensor([[0.0, 0.5, 0.97, 1.0], [0.5, 0.97, 0.1, 1.0], [0.5, 0.97, 0.3, 0.9]])
    expected = [
        [calibration.estimate(asked, belief) for belief in beliefs]
        for asked, beliefs in zip(requests, beliefs_BN.tolist(), strict=True)
    ]
    assert torch.allclose(calibration.estimates(requests, beliefs_BN), torch.tensor(expected))


def test_it_never_becomes_certain() -> None:
    calibration = Calibration()
    teach(calibration, 0.9, 1.0, 200)
    assert calibration.estimate(request([0]), 0.9) == 0.99


def test_a_proposal_is_settled_once() -> None:
    calibration = Calibration()
    asked = request([0])
    calibration.propose(asked, [1], [-1], [0.5])
    asked.tokens.append(0)
    calibration.settle(asked)
    known = calibration.estimate(asked, 0.5)
    assert known < 0.5
    calibration.settle(asked)
    assert calibration.estimate(asked, 0.5) == known


def fill(tree: Tree, tokens: list[int], parents: list[int], beliefs: list[float]) -> None:
    """What compiled code would grow."""
    tree.count = len(tokens)
    tree._tokens[: len(tokens)] = array("q", tokens)
    tree._parents[: len(tokens)] = array("i", parents)
    tree._beliefs[: len(tokens)] = array("d", beliefs)


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_compiled_trees_teach_the_same() -> None:
    """Trees of all sizes, none included, of few tokens, so that much is right; until both fade."""
    dice = random.Random(3)
    plain, compiled = Calibration(), Calibration()
    rules = compiled.rules(2, 12)
    asked = request([0])
    for _ in range(400):
        count = dice.randrange(13)
        parents = [dice.randrange(-1, node) for node in range(count)]
        tokens = [dice.randrange(3) for _ in range(count)]
        beliefs = [dice.choice([0.0, 1.0, MOST, dice.random()]) for _ in range(count)]
        plain.propose(asked, tokens, parents, beliefs)
        tree = compiled.tree(asked, 12, rules)
        fill(tree, tokens, parents, beliefs)
        assert compiled.grown(asked, tree).tokens == tokens
        asked.tokens += [dice.randrange(3) for _ in range(dice.randrange(6))]
        plain.settle(asked)
        compiled.settle(asked)
        assert compiled.ratios == plain.ratios
        assert compiled.ratio(asked) == plain.ratio(asked)
    assert len(set(plain.ratios)) > 30, "all bins were taught"


def test_tokens_that_end_a_tree_may_change() -> None:
    calibration, asked = Calibration(), request([0], stop=[3])
    rules = calibration.rules(2, 4)
    tree = calibration.tree(asked, 4, rules)
    assert calibration.tree(asked, 2, rules) is tree
    asked.stop_ids = frozenset({5})
    assert calibration.tree(asked, 4, rules).ends == {5}
