from __future__ import annotations

import itertools
import random

import pytest
import torch

from forerun.core import Draft
from forerun.drafters import tree

# The published example of Medusa's repository, in its own order: 0 1 00 01 02 10 11 12.
PATHS = [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_chain_is_a_thin_tree() -> None:
    assert tree.chain(0) == []
    assert tree.chain(3) == [-1, 0, 1]
    assert tree.positions(tree.chain(3), 10) == [10, 11, 12]
    assert torch.equal(tree.ancestor_mask(tree.chain(3)), torch.ones(3, 3).tril().bool())


def test_a_static_tree_is_read_from_its_paths() -> None:
    parents, ranks = tree.static(reversed(PATHS))
    assert parents == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert ranks == [0, 1, 0, 1, 2, 0, 1, 2]
    assert tree.depths(parents) == [0, 0, 1, 1, 1, 1, 1, 1]
    mask = tree.ancestor_mask(parents)
    assert mask[4].nonzero().flatten().tolist() == [0, 4]
    assert [tree.path(parents, node) for node in (-1, 1, 4)] == [[], [1], [0, 4]]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0,)], "once"),
        ([(0,), (1, 0)], r"needs its parent \[1\]"),
        ([(0,), (2,)], "better sibling"),
        ([()], "list of ranks"),
        ([(-1,)], "list of ranks"),
    ],
)
def test_a_static_tree_with_a_hole_is_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.static(paths)


def law(path: tuple[int, ...]) -> list[tuple[int, float]]:
    """A random law over four tokens, some of its mass given to none of them."""
    dice = random.Random(hash(path))
    weights = [dice.random() ** 3 for _ in range(5)]
    return [(token, weights[token] / sum(weights)) for token in range(4)]


def grow(
    nodes: int, depth: int, floor: float = 0.0, ends: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    draft = tree.best_first(
        (), law, lambda path, token: (*path, token), nodes, depth, floor=floor, ends=ends
    )
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, draft.survival, strict=True))


def every_path(depth: int) -> dict[tuple[int, ...], float]:
    """All paths up to a depth and their probabilities, by brute force."""
    chances = {(): 1.0}
    for level in range(1, depth + 1):
        for path in itertools.product(range(4), repeat=level):
            chances[path] = chances[path[:-1]] * dict(law(path[:-1]))[path[-1]]
    del chances[()]
    return chances


@pytest.mark.parametrize("nodes", [1, 5, 20])
def test_best_first_finds_the_likeliest_paths(nodes: int) -> None:
    chances = every_path(4)
    best = sorted(chances, key=lambda path: -chances[path])[:nodes]
    assert grow(nodes, depth=4) == pytest.approx({path: chances[path] for path in best})


def test_best_first_puts_the_likeliest_path_in_front() -> None:
    laws = {"": {1: 0.5, 2: 0.4}, "1": {3: 0.5}, "2": {4: 0.9}, "13": {5: 0.9}}
    draft = tree.best_first(
        "", lambda path: laws.get(path, {}).items(), lambda path, token: f"{path}{token}", 9, 9
    )
    assert draft.tokens == [1, 3, 5, 2, 4]
    assert draft.parents == [-1, 0, 1, -1, 3]
    assert draft.survival == pytest.approx([0.5, 0.25, 0.225, 0.4, 0.36])


def test_best_first_keeps_its_limits() -> None:
    chances = every_path(3)
    assert grow(1000, depth=3, floor=0.05) == pytest.approx(
        {path: chance for path, chance in chances.items() if chance >= 0.05}
    )
    assert {len(path) for path in grow(1000, depth=2)} == {1, 2}
    assert all(2 not in path[:-1] for path in grow(1000, depth=3, ends=(2,)))
    assert any(path[-1] == 2 for path in grow(1000, depth=3, ends=(2,)))
    assert grow(0, depth=3) == grow(5, depth=0) == {}


#        0 ── 2 ── 5
#        │    └─── 6
#        1 ── 3
#        └─── 4
TREE = Draft(
    tokens=[10, 11, 12, 13, 14, 15, 16],
    parents=[-1, -1, 0, 1, 1, 2, 2],
    survival=[0.6, 0.4, 0.5, 0.3, 0.1, 0.4, 0.1],
    probs_NV=torch.arange(7.0)[:, None],
    sources=list("abcdefg"),
)


def test_depth_first_puts_the_first_path_in_front() -> None:
    ordered = tree.depth_first(TREE)
    assert ordered.tokens == [10, 12, 15, 16, 11, 13, 14]
    assert ordered.parents == [-1, 0, 1, 1, -1, 4, 4]
    assert ordered.survival == [0.6, 0.5, 0.4, 0.1, 0.4, 0.3, 0.1]
    assert ordered.sources == list("acfgbde")
    assert ordered.probs_NV is not None
    assert ordered.probs_NV.flatten().tolist() == [0, 2, 5, 6, 1, 3, 4]


def test_pruning_remaps_parents() -> None:
    pruned = tree.prune(TREE, {6, 0, 2, 1, 4})
    assert pruned.tokens == [10, 11, 12, 14, 16]
    assert pruned.parents == [-1, -1, 0, 1, 2]
    assert pruned.survival == [0.6, 0.4, 0.5, 0.1, 0.1]
    assert pruned.sources == list("abceg")
    assert tree.prune(TREE, range(7)) is TREE
    assert len(tree.prune(TREE, [])) == 0


def test_pruning_refuses_orphans() -> None:
    with pytest.raises(AssertionError):
        tree.prune(TREE, {5, 0})


@pytest.mark.parametrize(
    ("truth", "decided"),
    [
        ([], {}),
        ([99], {0: False, 1: False}),
        ([10], {0: True, 1: False}),
        ([10, 99], {0: True, 1: False, 2: False}),
        ([11, 14, 1, 2], {0: False, 1: True, 3: False, 4: True}),
        ([10, 12, 16], {0: True, 1: False, 2: True, 5: False, 6: True}),
    ],
)
def test_what_follows_decides_the_children_of_right_nodes(
    truth: list[int], decided: dict[int, bool]
) -> None:
    assert dict(tree.outcomes(TREE, truth)) == decided


def test_duplicate_siblings_are_both_right() -> None:
    twins = Draft([5, 5, 6], [-1, -1, 1], [0.5, 0.5, 0.2])
    assert dict(tree.outcomes(twins, [5, 6])) == {0: True, 1: True, 2: True}
