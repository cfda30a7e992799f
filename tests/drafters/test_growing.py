from __future__ import annotations

import pytest
import torch

from drafting import check
from forerun.core import Draft
from forerun.drafters.growing import Growth

VOCAB = 7


def law(path: tuple[int, ...], seed: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(hash((seed, path)) & 0xFFFFFFFF)
    return (2 * torch.randn(VOCAB, generator=noise)).softmax(-1)


def grow(  # type: ignore[no-untyped-def]
    seed: int, top_k: int, depth: int, nodes: int, ends=(), floor: float = 0.0
) -> Growth:
    """A tree over `law`."""
    growth = Growth(nodes, depth, top_k, ends, floor)
    paths: list[tuple[int, ...]] = [()]
    while growth.frontier:
        probs, tokens = torch.stack([law(path, seed) for path in paths]).topk(top_k)
        growth.extend(tokens.tolist(), probs.tolist(), probs.tolist())
        paths = [tuple(growth.path(node)) for node in growth.frontier]
    return growth


def paths_of(draft: Draft) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, draft.survival, strict=True))


def expected(seed: int, top_k: int, depth: int, nodes: int, ends=()):  # type: ignore[no-untyped-def]
    """The same by brute force: path -> belief given the parent."""
    pool: dict[tuple[int, ...], tuple[float, float]] = {}
    frontier = [((), 1.0)]
    for _ in range(depth):
        level = {}
        for path, reached in frontier:
            if path and path[-1] in ends:
                continue
            probs = law(path, seed)
            for token in probs.topk(top_k).indices.tolist():
                level[(*path, token)] = (reached * float(probs[token]), float(probs[token]))
        pool |= level
        frontier = sorted(
            ((path, reached) for path, (reached, _) in level.items()), key=lambda each: -each[1]
        )[:top_k]
    best = sorted(pool.items(), key=lambda item: -item[1][0])[:nodes]
    return {path: belief for path, (_, belief) in best}


@pytest.mark.parametrize("nodes", [1, 5, 9])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_trees_are_those_of_brute_force(top_k: int, depth: int, nodes: int) -> None:
    for seed in range(5):
        draft = grow(seed, top_k, depth, nodes).draft()
        assert paths_of(draft) == pytest.approx(expected(seed, top_k, depth, nodes))
        beliefs = paths_of(draft)
        assert list(beliefs) == sorted(beliefs, key=lambda path: -reached(beliefs, path))


def reached(beliefs: dict[tuple[int, ...], float], path: tuple[int, ...]) -> float:
    chance = 1.0
    for length in range(1, len(path) + 1):
        chance *= beliefs[path[:length]]
    return chance


def test_nothing_follows_an_end() -> None:
    found = paths_of(grow(5, 3, 3, 12, ends=(0, 1, 2)).draft())
    assert found == pytest.approx(expected(5, 3, 3, 12, ends=(0, 1, 2)))
    assert found != pytest.approx(expected(5, 3, 3, 12))


def test_what_cannot_be_reached_is_left_out() -> None:
    growth = Growth(2, 1, 2, ())
    growth.extend([[3, 4]], [[0.5, 0.0]], [[0.5, 0.0]])
    draft = growth.draft()
    check(draft)
    assert draft.tokens == [3]


@pytest.mark.parametrize(("best", "goes_on"), [(0.5, True), (0.4, False)])
def test_no_level_is_begun_below_the_floor(best: float, goes_on: bool) -> None:
    growth = Growth(9, 4, 2, (), floor=0.3)
    growth.extend([[1, 2]], [[0.6, 0.4]], [[0.6, 0.4]])
    assert len(growth.frontier) == 2
    chances = [[best, 0.3], [0.2, 0.1]]
    growth.extend([[3, 4], [5, 6]], chances, chances)
    assert bool(growth.frontier) == goes_on
    assert len(growth.draft()) == 6, "what was found is kept"


def test_rows_are_the_paths_of_all_frontiers() -> None:
    growth = Growth(40, 4, 3, ())
    paths: list[tuple[int, ...]] = [()]
    rows: list[tuple[int, ...]] = []  # the path of each row, as told by its parent row
    while True:
        probs, tokens = torch.stack([law(path, 4) for path in paths]).topk(3)
        growth.extend(tokens.tolist(), probs.tolist(), probs.tolist())
        if not growth.frontier:
            break
        before, paths = paths, [tuple(growth.path(node)) for node in growth.frontier]
        assert [path[:-1] for path in paths] == [before[origin] for origin in growth.origins]
        for path, parent in zip(paths, growth.rows[len(rows) :], strict=True):
            rows.append((*(rows[parent] if parent >= 0 else ()), path[-1]))
        assert rows[-len(paths) :] == paths
    assert len(rows) == 9


def test_what_could_not_be_kept_is_not_expanded() -> None:
    growth = Growth(3, 3, 2, ())
    growth.extend([[1, 2]], [[0.8, 0.1]], [[0.8, 0.1]])
    assert [growth.tokens[node] for node in growth.frontier] == [1, 2]
    growth.extend([[3, 4], [5, 6]], [[0.9, 0.05], [0.6, 0.4]], [[0.9, 0.05], [0.6, 0.4]])
    assert [growth.tokens[node] for node in growth.frontier] == [3], "0.8, 0.72 and 0.1 are kept"
