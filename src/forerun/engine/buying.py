"""Which drafted nodes are worth a row: those with which tokens per second are most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core import Draft
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs
from forerun.engine.scheduler import NOTHING, Turn


@dataclass(frozen=True, slots=True)
class Purchase:
    """kept: the parts of the drafts that are bought. price: tokens a further row must bring."""

    kept: list[Draft]
    price: float


def buy(
    costs: Costs, turns: Sequence[Turn], chances: Sequence[list[float]], rows: int, spent: float
) -> Purchase:
    """chances: of the nodes of each turn's draft. `rows` others are in the pass anyway, and `spent`
    seconds were.

    With the n likeliest nodes a pass brings E(n) tokens in T(n) seconds; n maximises E / T.
    A node never survives without its parent, so any n likeliest nodes are whole trees.
    Tokens drawn from a law (`probs_NV`) are all kept: to drop one because of its value would
    bias the output (Leviathan et al. 2023, and every rule that compares p with q).
    """
    drafts = [turn.draft for turn in turns]
    drawn = [draft.probs_NV is not None for draft in drafts]
    rows += sum(len(draft) for draft, whole in zip(drafts, drawn, strict=True) if whole)
    tokens, seconds = float(len(turns)), plain_seconds(costs, turns) + spent
    best, count = tokens / seconds, 0
    # What is less likely raises the rate at no place.
    least = best * costs.least(rows)
    nodes = sorted(
        (-chance, i, node)
        for i, whole in enumerate(drawn)
        if not whole
        for node, chance in enumerate(chances[i])
        if chance >= least
    )
    factor, curve = costs.factor, costs.curve(rows + len(nodes) + 1)
    keys = [costs.row_key * turn.request.cached for turn in turns]
    seconds -= factor * curve[rows]
    total = 0.0
    for n, (minus_chance, i, _) in enumerate(nodes, 1):
        tokens -= minus_chance
        total += keys[i]
        rate = tokens / (seconds + factor * (curve[rows + n] + total))
        if rate > best:
            best, count = rate, n
    row = curve[rows + count + 1] - curve[rows + count] + sum(keys) / len(keys)
    kept: list[list[int]] = [[] for _ in drafts]
    for _, i, node in nodes[:count]:
        kept[i].append(node)
    parts = [
        draft if whole else prune(draft, part) if part else NOTHING
        for draft, whole, part in zip(drafts, drawn, kept, strict=True)
    ]
    return Purchase(parts, best * factor * row)


def plain_seconds(costs: Costs, turns: Sequence[Turn]) -> float:
    """Seconds of a pass over the last tokens of these alone: what prompts take in the same pass is
    spent anyway."""
    return costs.seconds([turn.request.cached for turn in turns], [1] * len(turns))


def survivals(draft: Draft) -> list[float]:
    """Survival per node, no larger than the parent's even where a drafter rounds badly."""
    found: list[float] = []
    for parent, chance in zip(draft.parents, draft.survival, strict=True):
        if parent >= 0 and found[parent] < chance:
            chance = found[parent]
        found.append(chance)
    return found
