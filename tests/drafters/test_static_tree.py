"""Trees of fixed shape, and the best one for measured accuracies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from forerun.drafters.marginals import Candidates
from forerun.drafters.static_tree import StaticTree, expected_tokens, optimal
from forerun.drafters.tree import static
from forerun.errors import ConfigError

# Vicuna 7B, top 1 to top 5 of each head, cumulative: the log of the run that the authors published.
TOP = [
    [0.5603876709938049, 0.6717196702957153, 0.7271371483802795, 0.7599403262138367, 0.77994531393],
    [0.31635186076164246, 0.4235834777355194, 0.4850894510746002, 0.5282057523727417, 0.5625],
    [0.2010437250137329, 0.28789758682250977, 0.3475397527217865, 0.3834492862224579, 0.4168737530],
    [0.14736579358577728, 0.22502483427524567, 0.27373260259, 0.3108846843242645, 0.3397117257118],
    [0.11754472553730012, 0.18663020431995392, 0.23459243774, 0.2721172869205475, 0.2998260259628],
]
VICUNA = [[b - a for a, b in itertools.pairwise([0.0, *row])] for row in TOP]


@pytest.mark.parametrize(
    ("nodes", "tokens"), [(4, 1.909), (8, 2.070), (16, 2.223), (32, 2.321), (63, 2.384)]
)
def test_published_accuracies_give_the_known_values(nodes: int, tokens: float) -> None:
    paths = optimal(VICUNA, nodes)
    assert len(paths) == nodes
    assert expected_tokens(paths, VICUNA) == pytest.approx(tokens, abs=5e-4)
    static(paths)  # raises unless it is a tree with all better siblings


def sequoia(p: Sequence[float], nodes: int, levels: int) -> float:
    """The oracle: the dynamic programme of Sequoia (arXiv 2402.12374, section 3.1), in which the
    b-th child of a node is right with probability p[b - 1]. The root is a node and a level."""

    @cache
    def best(m: int, level: int, b: int) -> float:
        """With m nodes, the root having b children."""
        if b == 0:
            return 1.0 if m == 1 else -1e9
        if m <= b or level <= 1:
            return -1e9
        if b == 1:
            return 1 + p[0] * whole(m - 1, level - 1)
        splits = (best(y, level, b - 1) + p[b - 1] * whole(m - y, level - 1) for y in range(1, m))
        return max(splits)

    @cache
    def whole(m: int, level: int) -> float:
        return max(best(m, level, b) for b in range(min(len(p), m - 1) + 1))

    return max(whole(m, levels) for m in range(1, nodes + 1))


P = (0.6, 0.2, 0.1, 0.05)


@pytest.mark.parametrize("levels", [2, 3, 5, 8])
def test_equals_the_dynamic_programme(levels: int) -> None:
    accuracies = [P] * (levels - 1)
    for nodes in range(2, 25):
        found = expected_tokens(optimal(accuracies, nodes - 1), accuracies)
        assert found == pytest.approx(sequoia(P, nodes, levels), abs=1e-12)


@pytest.mark.parametrize(("nodes", "tokens"), [(8, 2.7456), (16, 3.30936)])
def test_known_values_of_the_dynamic_programme(nodes: int, tokens: float) -> None:
    assert sequoia(P, nodes, 32) == pytest.approx(tokens, abs=1e-5)
    accuracies = [P] * 31
    assert expected_tokens(optimal(accuracies, nodes - 1), accuracies) == pytest.approx(
        tokens, abs=1e-5
    )


def all_trees(places: int, width: int, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Every set of paths of that size that is a tree, grown node by node."""
    trees = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        grown = set()
        for tree in trees:
            for parent in ((), *(path for path in tree if len(path) < places)):
                rank = sum(path[:-1] == parent for path in tree)
                if rank < width:
                    grown.add(tree | {(*parent, rank)})
        trees = grown
    return trees


@pytest.mark.parametrize("nodes", [1, 3, 5, 6])
def test_no_other_tree_of_its_size_is_worth_more(nodes: int) -> None:
    """All trees that there are, for measured accuracies."""
    measured = [[0.42, 0.2, 0.08], [0.25, 0.15, 0.12], [0.18, 0.05, 0.0]]
    worth = sorted(expected_tokens(list(tree), measured) for tree in all_trees(3, 3, nodes))
    assert expected_tokens(optimal(measured, nodes), measured) == pytest.approx(worth[-1])
    assert worth[0] < worth[-1] or nodes == 1


def test_another_tree_is_worth_less() -> None:
    """The control: a chain of as many nodes, and the best tree for other accuracies."""
    wide = [[0.3, 0.25, 0.2, 0.15]] * 4
    for paths in ([[0] * d for d in (1, 2, 3, 4)], optimal([[0.9, 0.05]] * 4, 4)):
        assert expected_tokens(paths, wide) < expected_tokens(optimal(wide, 4), wide)


def test_noisy_accuracies_still_give_a_tree() -> None:
    paths = optimal([[0.4, 0.1, 0.2], [0.1, 0.3]], 6)
    assert len(paths) == 6
    static(paths)


def write(folder: Path, content: object) -> Path:
    file = folder / "tree.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_file_is_read_in_any_order(tmp_path: Path) -> None:
    paths = [[1, 2], [0], [0, 0], [0, 1], [1], [0, 2], [1, 0], [1, 1]]
    tree = StaticTree.read(write(tmp_path, paths))
    assert tree.parents == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert tree.ranks == [0, 1, 0, 1, 2, 0, 1, 2]
    assert (tree.depth, tree.width) == (2, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0]", "is no tree"),
        ("7", "is no tree"),
        ([[0], [0]], "names each path once"),
        ([[0, 0]], "needs its parent"),
        ([[1]], "needs the better sibling"),
        ([[-1]], "ranks from 0 on"),
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StaticTree.read(write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tree file"):
        StaticTree.read(tmp_path / "tree.json")


RANKED = Candidates([[5, 6, 7], [8, 9]], [[0.5, 0.3, 0.1], [0.6, 0.2]])


def filled(tree: StaticTree, nodes: int, **more: object) -> set[tuple[int, ...]]:
    draft = tree.fill(RANKED, nodes, **more)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_filling() -> None:
    tree = StaticTree(*static([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]))
    everything = {(5,), (6,), (5, 8), (5, 9), (6, 8)}  # there is no third place
    assert filled(tree, 64) == everything
    assert filled(tree, 64, ends={5}) == {(5,), (6,), (6, 8)}
    assert filled(tree, 3) == {(5,), (6,), (5, 8)}  # 0.5, 0.3, 0.3
    draft = tree.fill(RANKED, 64)
    assert (draft.tokens[:2], draft.parents[:2]) == ([5, 8], [-1, 0])  # the likeliest path first
    assert draft.survival[:2] == [0.5, 0.6]
