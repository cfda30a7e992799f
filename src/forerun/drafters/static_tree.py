"""Trees of fixed shape: which rank of which place, chosen before a request is seen.

A tree is a list of paths of ranks, as published Medusa trees are written: [1, 0] is the best token
of the second place behind the second best of the first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.core import Draft
from forerun.drafters.marginals import Candidates, best_tree
from forerun.drafters.tree import depth_first, depths, path, static
from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Per node: its parent and its rank among the candidates of its place."""

    parents: list[int]
    ranks: list[int]

    @classmethod
    def read(cls, file: Path) -> StaticTree:
        """From a JSON list of paths. Raises `ConfigError` naming what is wrong with it."""
        try:
            return cls(*static(json.loads(file.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            raise ConfigError(f"there is no tree file {file}; check the path") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{file} is no tree ({error}); write a JSON list of paths, as [[0], [0, 0], [1]]"
            ) from None

    @property
    def depth(self) -> int:
        """How many tokens it looks ahead."""
        return max(depths(self.parents), default=-1) + 1

    @property
    def width(self) -> int:
        """How many candidates of a place it needs."""
        return max(self.ranks, default=-1) + 1

    def fill(self, candidates: Candidates, nodes: int, ends: Collection[int] = ()) -> Draft:
        """The tree with tokens, cut to its `nodes` likeliest nodes; `survival` holds the belief in
        each node given its parent. Where there is no candidate of a rank, or behind one of `ends`,
        there is no node."""
        places = depths(self.parents)
        reached = {-1: 1.0}  # node -> probability of its path
        beliefs: dict[int, float] = {}
        tokens: dict[int, int] = {}
        for node, (parent, rank, place) in enumerate(
            zip(self.parents, self.ranks, places, strict=True)
        ):
            if place >= len(candidates.tokens) or rank >= len(candidates.tokens[place]):
                continue
            belief = candidates.beliefs[place][rank]
            if belief > 0 and parent in reached and tokens.get(parent) not in ends:
                tokens[node] = candidates.tokens[place][rank]
                beliefs[node] = belief
                reached[node] = reached[parent] * belief
        kept = sorted(sorted(tokens, key=lambda node: -reached[node])[:nodes])
        index = {node: new for new, node in enumerate(kept)} | {-1: -1}
        return depth_first(
            Draft(
                [tokens[node] for node in kept],
                [index[self.parents[node]] for node in kept],
                [beliefs[node] for node in kept],
            )
        )


def write(paths: Sequence[Sequence[int]], file: Path) -> None:
    """As `StaticTree.read` reads it. Raises `ConfigError` where the file cannot be written."""
    try:
        file.write_text(json.dumps(paths) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror}); name another file"
        ) from None


def optimal(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The paths of the static tree of `nodes` nodes with the most expected tokens.

    accuracies: per place and rank, the share of times that this candidate was the right one. Read
    as chances that are independent from place to place (Cai et al. 2024, section 2.3.3). What is
    measured is noisy: values that grow with the rank are taken in falling order.
    """
    falling = [sorted(row, reverse=True) for row in accuracies]
    ranks = [range(len(row)) for row in falling]
    tree = best_tree(Candidates(ranks, falling), nodes)
    paths = [[tree.tokens[n] for n in path(tree.parents, node)] for node in range(len(tree))]
    return sorted(paths, key=lambda ranks: (len(ranks), ranks))


def expected_tokens(paths: Sequence[Sequence[int]], accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens of a step, the target's own included, with a tree of these paths; accuracies are read
    as `optimal` reads them."""
    falling = [sorted(row, reverse=True) for row in accuracies]
    total = 1.0
    for ranks in paths:
        chance = 1.0
        for row, rank in zip(falling, ranks, strict=False):
            chance *= row[rank]
        total += chance
    return total
