"""Trees that grow level by level: every level is one pass over the likeliest nodes so far.

Li et al. 2024 (EAGLE-2, arXiv 2406.16858, section 4): expand the K nodes of the last level that are
likeliest to be reached, keep the N likeliest of all candidates. A node is never likelier than its
parent, so what is kept is a tree.

B requests, K nodes of a frontier and candidates per node, S nodes of all frontiers, P candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core import Draft


class Growth:
    """The trees of B requests. The frontier holds the nodes to expand next.

    tokens_BK, reached_BK: of the frontier: its tokens, and the log of the chance that a node and
    all its ancestors are right; -inf for a node that is not there.
    parents_BK: per frontier node, the row of its parent in the frontier before.
    ancestors_BKS: bool, for each frontier node, which of the frontier nodes so far lie on its path,
    itself included.
    """

    def __init__(self, tokens_BK: Tensor, beliefs_BK: Tensor, chances_BK: Tensor) -> None:
        """From the candidates of the roots, best first.

        beliefs: what the drafter says of a candidate whose ancestors are right; chances: the same
        after correction, by which candidates are compared. 0: not there.
        """
        nodes = tokens_BK.shape[1]
        self._eye_KK = torch.eye(nodes, dtype=torch.bool, device=tokens_BK.device)
        self._indices_BK = torch.arange(nodes, device=tokens_BK.device).expand_as(tokens_BK)
        self.tokens_BK, self.reached_BK = tokens_BK, chances_BK.log()
        self.parents_BK = torch.zeros_like(tokens_BK)
        self.ancestors_BKS = self._eye_KK.expand(len(tokens_BK), -1, -1)
        self._tokens, self._beliefs = [tokens_BK], [beliefs_BK]
        self._reached = [self.reached_BK]
        self._parents = [torch.full_like(tokens_BK, -1)]
        self._candidates = nodes

    def extend(
        self, tokens_BKK: Tensor, beliefs_BKK: Tensor, chances_BKK: Tensor, ended_BK: Tensor | None
    ) -> None:
        """Add the candidates of every frontier node; the best of them are the next frontier.

        ended_BK: frontier nodes that nothing follows.
        """
        nodes = self.tokens_BK.shape[1]
        reached_BK = self.reached_BK
        if ended_BK is not None:
            reached_BK = reached_BK.masked_fill(ended_BK, -torch.inf)
        reached_BP = (reached_BK[..., None] + chances_BKK.log()).flatten(1)
        tokens_BP = tokens_BKK.flatten(1)
        self._tokens.append(tokens_BP)
        self._beliefs.append(beliefs_BKK.flatten(1))
        self._reached.append(reached_BP)
        self._parents.append(self._indices_BK.repeat_interleave(nodes, 1))
        self.reached_BK, best_BK = reached_BP.topk(nodes)
        self.tokens_BK = tokens_BP.gather(1, best_BK)
        self.parents_BK = best_BK // nodes
        inherited_BKS = self.ancestors_BKS.gather(
            1, self.parents_BK[..., None].expand_as(self.ancestors_BKS)
        )
        own_BKK = self._eye_KK.expand(len(best_BK), -1, -1)
        self.ancestors_BKS = torch.cat((inherited_BKS, own_BKK), -1)
        self._indices_BK = self._candidates + best_BK
        self._candidates += reached_BP.shape[1]

    def drafts(self, nodes: Sequence[int], depths: Sequence[int]) -> list[Draft]:
        """The likeliest `nodes` candidates of each tree, down to its depth, parents before children
        and the likeliest first. `survival` holds the belief in each, given its parent."""
        reached_BP = torch.cat(self._reached, 1)
        sizes = torch.tensor([level.shape[1] for level in self._reached])
        levels_P = torch.arange(1, len(sizes) + 1).repeat_interleave(sizes).to(reached_BP.device)
        too_deep_BP = levels_P > levels_P.new_tensor(depths)[:, None]
        reached_BP = reached_BP.masked_fill(too_deep_BP, -torch.inf)
        reached, order_BN = reached_BP.topk(min(max(nodes), reached_BP.shape[1]))
        parts = (self._tokens, self._parents, self._beliefs)
        columns = [torch.cat(part, 1).gather(1, order_BN) for part in parts]
        lists = (column.tolist() for column in (reached, order_BN, *columns))
        rows = zip(nodes, *lists, strict=True)
        return [_draft(*row) for row in rows]


def _draft(
    nodes: int,
    reached: list[float],
    order: list[int],
    tokens: list[int],
    parents: list[int],
    beliefs: list[float],
) -> Draft:
    there = min(nodes, sum(chance > float("-inf") for chance in reached))
    index = {candidate: node for node, candidate in enumerate(order[:there])}
    index[-1] = -1
    return Draft(tokens[:there], [index[parent] for parent in parents[:there]], beliefs[:there])
