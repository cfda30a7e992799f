"""Which drafted nodes are worth a row of the pass. Decides about speed, never about text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core import Draft, Request
from forerun.drafters.tree import prune
from forerun.engine.costs import Costs
from forerun.engine.scheduler import Turn

MAX_NODES = 64  # per draft: making more takes longer than they could win
MEMORY = 15 / 16  # weight of the past in a ledger: a window of about 16 drafts
LOSS = -0.5  # tokens' worth of time lost in a window before a request stops drafting for a while
LONGEST_PAUSE = 64  # passes


@dataclass(slots=True)
class Ledger:
    """What drafting has brought one request: tokens won, less the time spent in tokens' worth."""

    balance: float = 0.0
    pause: int = 0  # passes still to go without a draft
    next_pause: int = 2

    def book(self, gain: float) -> None:
        """Account for one draft; pause, twice as long every time, where drafts do not pay."""
        self.balance = self.balance * MEMORY + gain
        if gain > 0:
            self.next_pause = max(2, self.next_pause // 2)
        if self.balance < LOSS:
            self.pause = self.next_pause
            self.next_pause = min(LONGEST_PAUSE, 2 * self.next_pause)
            self.balance = LOSS / 2  # a probe that fails ends in the next pause soon


class Plan:
    """Buys rows in order of their chance to survive, as long as they raise tokens per second.

    costs: seconds of a pass by its rows.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._ledgers: dict[int, Ledger] = {}

    def budgets(self, requests: Sequence[Request], rows_left: int) -> list[int]:
        """How many nodes each request's drafter may propose, so that all fit into `rows_left`."""
        share = min(MAX_NODES, rows_left // max(1, len(requests)))
        return [self._budget(request, share) for request in requests]

    def keep(self, drafts: list[Draft], rows: int) -> list[Draft]:
        """The parts of the drafts that are worth their rows; `rows` others are in the pass anyway.

        drafts: of all requests that decide, the empty ones too; each brings a token anyway.
        With the n likeliest nodes a pass brings E(n) tokens in T(n) seconds; n maximises E / T.
        A node never survives without its parent, so any n likeliest nodes are whole trees.
        Tokens drawn from a law (`probs_NV`) are all kept: to drop one because of its value would
        bias the output (Leviathan et al. 2023, and every rule that compares p with q).
        """
        nodes = sorted(
            (-chance, i, node)
            for i, draft in enumerate(drafts)
            if draft.probs_NV is None
            for node, chance in enumerate(_chances(draft))
        )
        fixed = sum(len(draft) for draft in drafts if draft.probs_NV is not None)
        rows += fixed
        tokens = float(len(drafts))
        best, count = tokens / self._costs[rows], 0
        for n, (minus_chance, _, _) in enumerate(nodes, 1):
            tokens -= minus_chance
            rate = tokens / self._costs[rows + n]
            if rate > best:
                best, count = rate, n
        if count == len(nodes):
            return drafts
        kept: list[list[int]] = [[] for _ in drafts]
        for _, i, node in nodes[:count]:
            kept[i].append(node)
        return [
            draft if draft.probs_NV is not None else prune(draft, kept[i])
            for i, draft in enumerate(drafts)
        ]

    def learn(self, turns: Sequence[Turn], draft_seconds: float) -> None:
        """Compare what the drafts of a pass won with what they cost."""
        if not turns:
            return
        plain = len(turns)
        nodes = sum(len(turn.draft) for turn in turns)
        row_seconds = (self._costs[plain + nodes] - self._costs[plain]) / max(1, nodes)
        token_seconds = self._costs[plain] / plain
        for turn in turns:
            assert turn.verdict
            spent = row_seconds * len(turn.draft) + draft_seconds / plain
            self._ledger(turn.request).book(len(turn.verdict.path) - spent / token_seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._ledgers.pop(request.id, None)

    def _ledger(self, request: Request) -> Ledger:
        return self._ledgers.setdefault(request.id, Ledger())

    def _budget(self, request: Request, share: int) -> int:
        ledger = self._ledger(request)
        if ledger.pause:
            ledger.pause -= 1
            return 0
        # The pass brings one token beside the accepted ones.
        return max(0, min(share, request.remaining - 1))


class Static(Plan):
    """Checks every node that a drafter's own settings propose, in every pass, whatever it costs.

    For papers and comparisons: a chain of k or a tree of n nodes is then just that.
    """

    def __init__(self) -> None:
        super().__init__(Costs({1: 1.0}))

    def keep(self, drafts: list[Draft], rows: int) -> list[Draft]:
        return drafts

    def learn(self, turns: Sequence[Turn], draft_seconds: float) -> None:
        """Nothing: no request ever pauses."""


def _chances(draft: Draft) -> list[float]:
    """Survival per node, no larger than the parent's even where a drafter rounds badly."""
    chances: list[float] = []
    for parent, chance in zip(draft.parents, draft.survival, strict=True):
        chances.append(chance if parent < 0 else min(chance, chances[parent]))
    return chances
