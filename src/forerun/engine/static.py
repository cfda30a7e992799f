"""No plan: every draft is asked for and checked."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import Draft, Request
from forerun.engine.costs import Costs
from forerun.engine.plan import Plan, most_nodes
from forerun.engine.scheduler import Took, Turn


class Static(Plan):
    """Checks every node that a drafter's own settings propose, in every pass, whatever it costs.

    For papers and comparisons: a chain of k or a tree of n nodes is then just that.
    """

    def __init__(self) -> None:
        super().__init__(Costs({1: 1.0}))

    def follows(self, request: Request) -> bool:
        return request.params.speculation.enabled

    def budgets(self, turns: Sequence[Turn], rows_left: int, crowded: bool = False) -> list[int]:
        share = rows_left // max(1, len(turns))
        return [min(share, most_nodes(turn.request)) for turn in turns]

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        return [turn.draft for turn in turns]

    def predict(self, turns: Sequence[Turn]) -> float:
        return 0.0

    def learn(self, asked: Sequence[Turn], took: Took) -> None:
        """Nothing: every request is asked for in every step."""
