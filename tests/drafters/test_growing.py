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


def grow(seeds: list[int], top_k: int, depth: int, nodes: list[int], depths: list[int], ends=()):  # type: ignore[no-untyped-def]
    """Trees over `law`, one per seed; also the ancestors of the last frontiers."""
    probs_BK, tokens_BK = torch.stack([law((), seed) for seed in seeds]).topk(top_k)
    growth = Growth(tokens_BK, probs_BK, probs_BK)
    paths = [[(token,) for token in row] for row in tokens_BK.tolist()]
    for _ in range(depth - 1):
        laws = [[law(path, seed) for path in row] for row, seed in zip(paths, seeds, strict=True)]
        probs, tokens = torch.stack([torch.stack(row) for row in laws]).topk(top_k)
        ended = torch.isin(growth.tokens_BK, torch.tensor(ends)) if ends else None
        growth.extend(tokens, probs, probs, ended)
        paths = [
            [(*row[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for row, parents, tokens in zip(
                paths, growth.parents_BK.tolist(), growth.tokens_BK.tolist(), strict=True
            )
        ]
    return growth, growth.drafts(nodes, depths)


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


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_trees_are_those_of_brute_force(top_k: int, depth: int) -> None:
    seeds, nodes = [1, 2, 3], [1, 5, 9]
    _, drafts = grow(seeds, top_k, depth, nodes, [depth] * 3)
    for seed, most, draft in zip(seeds, nodes, drafts, strict=True):
        assert paths_of(draft) == pytest.approx(expected(seed, top_k, depth, most))
        beliefs = paths_of(draft)
        assert list(beliefs) == sorted(beliefs, key=lambda path: -reached(beliefs, path))


def reached(beliefs: dict[tuple[int, ...], float], path: tuple[int, ...]) -> float:
    chance = 1.0
    for length in range(1, len(path) + 1):
        chance *= beliefs[path[:length]]
    return chance


def test_each_tree_ends_at_its_own_depth() -> None:
    _, drafts = grow([1, 2], 3, 4, [9, 9], [2, 4])
    assert paths_of(drafts[0]) == pytest.approx(expected(1, 3, 2, 9))
    assert paths_of(drafts[1]) == pytest.approx(expected(2, 3, 4, 9))


def test_nothing_follows_an_end() -> None:
    _, (draft,) = grow([5], 3, 3, [12], [3], ends=(0, 1, 2))
    found = paths_of(draft)
    assert found == pytest.approx(expected(5, 3, 3, 12, ends=(0, 1, 2)))
    assert found != pytest.approx(expected(5, 3, 3, 12))


def test_what_cannot_be_reached_is_left_out() -> None:
    tokens = torch.tensor([[3, 4]])
    chances = torch.tensor([[0.5, 0.0]])
    (draft,) = Growth(tokens, chances, chances).drafts([2], [1])
    check(draft)
    assert draft.tokens == [3]


def test_ancestors_of_the_frontier_are_its_paths() -> None:
    growth, _ = grow([4], 3, 3, [9], [3])
    one, two = growth.ancestors_BKS[0, :, :3], growth.ancestors_BKS[0, :, 3:6]
    assert growth.ancestors_BKS.shape == (1, 3, 9)
    assert torch.equal(growth.ancestors_BKS[0, :, 6:], torch.eye(3, dtype=torch.bool))
    assert torch.equal(two.long().argmax(-1), growth.parents_BK[0])
    assert (one.sum(-1) == 1).all()
    assert (two.sum(-1) == 1).all()
