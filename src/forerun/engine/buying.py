"""Which drafted nodes are worth a row: those with which tokens per second are most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.core import Draft
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs
from forerun.engine.scheduler import NOTHING, Turn


class Purchase(NamedTuple):
    """kept: the parts of the drafts that are bought. price: tokens a further row must bring.

    likely: per turn, the nodes that may be worth a row somewhere, with their chances.
    """

    kept: list[Draft]
    price: float
    likely: list[dict[int, float]]


def buy(
    costs: Costs,
    turns: Sequence[Turn],
    trusts: Sequence[float],
    urgencies: Sequence[float],
    rows: int,
    spent: float,
) -> Purchase:
    """trusts: accepted tokens for each that a turn's draft promises. urgencies: as many tokens each
    of a turn's counts for. `rows` others are in the pass anyway, and `spent` seconds were.

    With the n nodes of most worth a pass brings E(n) tokens in T(n) seconds; n maximises E / T.
    A node never survives without its parent, so any n such nodes are whole trees.
    Tokens drawn from a law (`probs_NV`) are all kept: to drop one because of its value would
    bias the output (Leviathan et al. 2023, and every rule that compares p with q).
    """
    drafts = [turn.draft for turn in turns]
    drawn = [draft.probs_NV is not None for draft in drafts]
    rows += sum(len(draft) for draft, whole in zip(drafts, drawn, strict=True) if whole)
    prefixes = [turn.request.cached for turn in turns]
    tokens, seconds = float(len(turns)), costs.plain(prefixes) + spent
    best, count = tokens / seconds, 0
    least = best * costs.least(rows)  # what is less likely raises the rate at no place
    found = [
        likely(draft, trust, 0.0 if whole else least / urgency)
        for draft, trust, urgency, whole in zip(drafts, trusts, urgencies, drawn, strict=True)
    ]
    nodes = [
        (i, node) for i, whole in enumerate(drawn) if not whole and found[i] for node in found[i]
    ]
    worths = [
        urgencies[i] * chance
        for i, whole in enumerate(drawn)
        if not whole
        for chance in found[i].values()
    ]
    # Those of most worth first; of those with as much, the first.
    order = sorted(range(len(nodes)), key=worths.__getitem__, reverse=True)
    factor, curve = costs.factor, costs.curve(rows, rows + len(nodes) + 1)
    keys = [costs.row_key * prefix for prefix in prefixes]
    seconds -= factor * curve[0]
    total = 0.0
    for n, place in enumerate(order, 1):
        tokens += worths[place]
        total += keys[nodes[place][0]]
        rate = tokens / (seconds + factor * (curve[n] + total))
        if rate > best:
            best, count = rate, n
    row = curve[count + 1] - curve[count] + sum(keys) / len(keys)
    bought: dict[int, list[int]] = {}
    for place in order[:count]:
        i, node = nodes[place]
        bought.setdefault(i, []).append(node)
    kept = [
        draft if whole else prune(draft, bought[i]) if i in bought else NOTHING
        for i, (draft, whole) in enumerate(zip(drafts, drawn, strict=True))
    ]
    return Purchase(kept, best * factor * row, found)


def likely(draft: Draft, trust: float, least: float) -> dict[int, float]:
    """The nodes whose chance to survive is `least` or more, each with its chance.

    That is what the draft promises as far as it is trusted, no larger than the parent's even where
    a drafter rounds badly; and nothing is likelier than certain.
    """
    parents, survival = draft.parents, draft.survival
    found = {-1: 1.0}
    for node in [node for node, chance in enumerate(survival) if trust * chance >= least]:
        above = found.get(parents[node])
        if above is not None:
            chance = trust * survival[node]
            found[node] = chance if chance < above else above
    del found[-1]
    return found
