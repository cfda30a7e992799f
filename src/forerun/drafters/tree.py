"""Trees of drafted tokens: shape, growth, pruning.

A tree is a list of parents, parents before children; -1 hangs from the last committed token. A
chain is a thin tree: -1, 0, 1, 2, ...
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import lt
from typing import TypeVar

import torch
from torch import Tensor

from forerun.core import Draft

State = TypeVar("State")


def chain(nodes: int) -> list[int]:
    """The parents of a chain."""
    return list(range(-1, nodes - 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Per node, the number of its ancestors: 0 for those that hang from the committed token."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def positions(parents: Sequence[int], length: int) -> list[int]:
    """Per node, its position in the sequence, where `length` tokens are committed."""
    return [length + depth for depth in depths(parents)]


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Bool [N, N]: row n sees column m where m is n itself or one of its ancestors."""
    mask_NN = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask_NN[node] |= mask_NN[parent]
    return mask_NN


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`, itself included; empty for -1."""
    upwards = []
    while node >= 0:
        upwards.append(node)
        node = parents[node]
    return upwards[::-1]


def static(paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Parents and sibling ranks of a tree that is written as a set of paths.

    A path (c0, c1, ...) is the node that is the c1-th best child of the c0-th best child of the
    root, as published Medusa trees are written (Cai et al. 2024, section 2.1.2). Nodes are ordered
    by depth, then by rank. Raises `ValueError` unless paths are unique and every node's parent and
    better siblings are there, too.
    """
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(ordered)}
    if len(index) < len(ordered):
        raise ValueError("a tree names each path once")
    for node in ordered:
        if not node or min(node) < 0:
            raise ValueError(f"a path is a list of ranks from 0 on, not {list(node)}")
        if len(node) > 1 and node[:-1] not in index:
            raise ValueError(f"path {list(node)} needs its parent {list(node[:-1])}")
        if node[-1] and (*node[:-1], node[-1] - 1) not in index:
            raise ValueError(f"path {list(node)} needs the better sibling before it")
    return [index.get(node[:-1], -1) for node in ordered], [node[-1] for node in ordered]


def best_first(
    root: State,
    successors: Callable[[State], Iterable[tuple[int, float]]],
    advance: Callable[[State, int], State],
    nodes: int,
    depth: int,
    floor: float = 0.0,
    ends: Collection[int] = (),
) -> Draft:
    """Grow the `nodes` most probable paths of at most `depth` tokens and probability `floor`.

    successors: the tokens that may follow in a state, each with its probability there.
    advance: the state behind a token. ends: tokens after which nothing follows.
    Survival is the path probability, never more than the parent's: this is the best tree of its
    size (EAGLE-2, Li et al. 2024, section 4.2). Nodes come in the order of `depth_first`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    heap: list[tuple[float, int, int, int, State, int]] = []
    pushed = 0  # breaks ties by age, so that states are never compared

    def offer(state: State, node: int, reached: float, level: int) -> None:
        nonlocal pushed
        for token, probability in successors(state):
            if reached * probability >= floor:
                pushed += 1
                heapq.heappush(heap, (-reached * probability, pushed, node, level, state, token))

    if nodes > 0 and depth > 0:
        offer(root, -1, 1.0, 1)
    while heap and len(tokens) < nodes:
        negative, _, parent, level, state, token = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        survival.append(-negative)
        if level < depth and token not in ends and len(tokens) < nodes:
            offer(advance(state, token), len(tokens) - 1, -negative, level + 1)
    return depth_first(Draft(tokens, parents, survival))


def depth_first(draft: Draft) -> Draft:
    """The same tree, every node followed by its subtree, siblings in the order they had.

    With the likeliest siblings first, the likeliest path stands first and unbroken: its keys then
    lie in the slots in which plain decoding would write them, and sums over them are the same.
    """
    if draft.is_chain:
        return draft
    children: list[list[int]] = [[] for _ in range(len(draft) + 1)]  # the last one: of the root
    for node, parent in enumerate(draft.parents):
        children[parent].append(node)
    order: list[int] = []
    stack = children[-1][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        if children[node]:
            stack += children[node][::-1]
    return _select(draft, order)


def prune(draft: Draft, keep: Iterable[int]) -> Draft:
    """The tree of the nodes `keep` alone, which must hold every node's parent, in their order."""
    kept = sorted(keep)
    return draft if len(kept) == len(draft) else _select(draft, kept)


def _select(draft: Draft, nodes: Sequence[int]) -> Draft:
    new_index = [len(draft)] * len(draft) + [-1]  # the last one: of the root
    for index, node in enumerate(nodes):
        new_index[node] = index
    tokens, parents, survival = draft.tokens, draft.parents, draft.survival
    new_parents = [new_index[parents[node]] for node in nodes]
    assert all(map(lt, new_parents, range(len(nodes)))), "parents before children"
    return Draft(
        tokens=[tokens[node] for node in nodes],
        parents=new_parents,
        survival=[survival[node] for node in nodes],
        probs_NV=None if draft.probs_NV is None else draft.probs_NV[list(nodes)],
        sources=[draft.sources[node] for node in nodes] if draft.sources else (),
    )


def outcomes(draft: Draft, truth: Sequence[int]) -> list[tuple[int, bool]]:
    """What the tokens that really followed decide: (node, whether it was right).

    Decided are the children of the root and of every right node, as far as `truth` reaches.
    """
    decided = []
    right = {-1: 0}  # node -> index of the true token behind it
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        next_true = right.get(parent)
        if next_true is None or next_true >= len(truth):
            continue
        hit = token == truth[next_true]
        if hit:
            right[node] = next_true + 1
        decided.append((node, hit))
    return decided
