"""Requests that say which of several drafters they want: a plan of its own for each of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from forerun.core import Draft, Request
from forerun.drafters.base import Drafter
from forerun.drafters.combined import Combined
from forerun.engine.plan import Plan
from forerun.engine.scheduler import Took, Turn
from forerun.engine.static import Static

T = TypeVar("T")


def members(drafter: Drafter | None) -> dict[str, Drafter]:
    """The drafters that a request may ask for, by name; of two with one name, the first."""
    if drafter is None:
        return {}
    drafters = drafter.drafters if isinstance(drafter, Combined) else [drafter]
    return {each.name: each for each in reversed(drafters)}


class Choices(Plan):
    """Asks the plan of each request's choice; all plans share the costs.

    What a drafter alone is worth says little of what all of them are worth, and the other way
    round. plan: of requests that say nothing.
    """

    def __init__(self, plan: Plan, drafters: Mapping[str, Drafter]) -> None:
        self.costs = plan.costs
        self._plan = plan
        self._static = isinstance(plan, Static)
        self._drafters = drafters
        self._plans: dict[str, Plan] = {}

    def follows(self, request: Request) -> bool:
        name = request.params.speculation.draft
        if name is not None and not self._drafters[name].taps:
            return False
        return self._of(name).follows(request)

    def rests(self, turns: Sequence[Turn]) -> bool:
        return False

    def budgets(self, turns: Sequence[Turn], rows_left: int, crowded: bool = False) -> list[int]:
        def ask(plan: Plan, group: Sequence[Turn]) -> list[int]:
            nonlocal rows_left
            found = plan.budgets(group, rows_left, crowded)
            rows_left -= sum(found)
            return found

        return self._each(turns, ask)

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        def buy(plan: Plan, group: Sequence[Turn]) -> list[Draft]:
            nonlocal rows
            found = plan.keep(group, rows, spent)
            rows += sum(map(len, found))
            return found

        return self._each(turns, buy)

    def predict(self, turns: Sequence[Turn]) -> float:
        return self._plan.predict(turns)

    def learn(self, asked: Sequence[Turn], took: Took) -> None:
        told = sum(turn.drafting for turn in asked)
        rest = took.seconds - took.speculating
        groups = {None: [], **_grouped(asked)}
        for name, group in groups.items():
            drafting = sum(turn.drafting for turn in group)
            share = drafting / told if told else len(group) / max(1, len(asked))
            part = took.speculating * share
            predicted = 0.0 if name else took.predicted  # the costs are the same: they learn once
            self._of(name).learn(group, Took(took.rows, rest + part, part, predicted))

    def forget(self, request: Request) -> None:
        self._of(request.params.speculation.draft).forget(request)

    def _of(self, name: str | None) -> Plan:
        if name is None:
            return self._plan
        if name not in self._plans:
            reads = [bool(way.taps) for way in self._drafters[name].ways]
            self._plans[name] = Static() if self._static else Plan(self.costs, reads)
        return self._plans[name]

    def _each(
        self, turns: Sequence[Turn], do: Callable[[Plan, Sequence[Turn]], list[T]]
    ) -> list[T]:
        """What the plans say of their turns, in the order of the turns."""
        found = {}
        for name, group in _grouped(turns).items():
            for turn, each in zip(group, do(self._of(name), group), strict=True):
                found[turn.request.id] = each
        return [found[turn.request.id] for turn in turns]


def _grouped(turns: Sequence[Turn]) -> dict[str | None, list[Turn]]:
    groups: dict[str | None, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.request.params.speculation.draft, []).append(turn)
    return groups
