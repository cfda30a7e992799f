"""Trees that grow level by level: every level is one pass over the likeliest nodes so far.

Li et al. 2024 (EAGLE-2, arXiv 2406.16858, section 4): expand the K nodes of the last level that are
likeliest to be reached, keep the N likeliest of all candidates. A node is never likelier than its
parent, so what is kept is a tree.

Plain lists: at a few dozen candidates the smallest tensor operation costs more than all of a level.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forerun.core import Draft


class Growth:
    """The tree of one request.

    frontier: the candidates to expand next, best first; at the start the root, -1.
    origins: per frontier node, the place of its parent in the frontier before.
    rows: per candidate that was in a frontier, in that order, its parent among them (-1: the root).
    """

    __slots__ = (
        "_beliefs",
        "_depth",
        "_ends",
        "_floor",
        "_nodes",
        "_origins",
        "_parents",
        "_width",
        "frontier",
        "level",
        "origins",
        "reached",
        "rows",
        "tokens",
    )

    def __init__(
        self, nodes: int, depth: int, width: int, ends: Collection[int], floor: float = 0.0
    ) -> None:
        """At most `nodes` in a tree, `depth` of them in a path, `width` in a frontier.

        ends: tokens that nothing follows. floor: no level is begun whose nodes are all less likely.
        """
        self._nodes, self._depth, self._width = nodes, depth, width
        self._ends, self._floor = ends, floor
        self.level = 0  # of the candidates that come next
        self.tokens: list[int] = []
        self.reached: list[float] = []  # the chance that a node and all its ancestors are right
        self._beliefs: list[float] = []
        self._parents: list[int] = []
        self._origins: list[int] = []
        self.frontier, self.origins = [-1], [0]
        self.rows: list[int] = []

    def extend(
        self,
        tokens_FK: Sequence[Sequence[int]],
        beliefs_FK: Sequence[Sequence[float]],
        chances_FK: Sequence[Sequence[float]],
    ) -> None:
        """Add the candidates behind every frontier node; the best of them are the next frontier.

        beliefs: what the drafter says of a candidate whose ancestors are right; chances: the same
        after correction, by which candidates are compared. 0: not there.
        """
        first = len(self.tokens)
        for place, node in enumerate(self.frontier):
            above = self.reached[node] if node >= 0 else 1.0
            for token, belief, chance in zip(
                tokens_FK[place], beliefs_FK[place], chances_FK[place], strict=True
            ):
                if chance > 0:
                    self.tokens.append(token)
                    self.reached.append(above * chance)
                    self._beliefs.append(belief)
                    self._parents.append(node)
                    self._origins.append(place)
        self.level += 1
        self._advance(first)

    def _advance(self, first: int) -> None:
        """Choose the next frontier among the candidates from `first` on."""
        before = len(self.rows) - len(self.frontier)  # row of the first node of the old frontier
        self.frontier = []
        if self.level < self._depth:
            reached = self.reached
            new = sorted(range(first, len(reached)), key=reached.__getitem__, reverse=True)
            least = self._least()
            if new and reached[new[0]] >= self._floor:
                self.frontier = [
                    node
                    for node in new[: self._width]
                    if reached[node] > least and self.tokens[node] not in self._ends
                ]
        self.origins = [self._origins[node] for node in self.frontier]
        if self.level == 1:
            self.rows += [-1] * len(self.frontier)
        else:
            self.rows += [before + origin for origin in self.origins]

    def _least(self) -> float:
        """What a node must exceed so that a child of it could be kept."""
        if len(self.reached) < self._nodes:
            return 0.0
        return sorted(self.reached)[-self._nodes]

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child down to a candidate."""
        upwards = []
        while node >= 0:
            upwards.append(self.tokens[node])
            node = self._parents[node]
        return upwards[::-1]

    def draft(self) -> Draft:
        """The likeliest candidates, parents before children and the likeliest first. `survival`
        holds the belief in each, given its parent."""
        order = sorted(range(len(self.reached)), key=self.reached.__getitem__, reverse=True)
        del order[self._nodes :]
        index = {candidate: node for node, candidate in enumerate(order)}
        index[-1] = -1
        return Draft(
            [self.tokens[candidate] for candidate in order],
            [index[self._parents[candidate]] for candidate in order],
            [self._beliefs[candidate] for candidate in order],
        )
