"""What drafts of a request are expected to bring: learned from what they promise, and from how much
of their promises comes true.

The worth of a draft is what remains of the accepted tokens when its rows are paid for: the sum over
its nodes of survival - price, where `price` is the number of tokens that a row must bring, and nodes
below it are not bought. D drafts, L levels (largest numbers of nodes), N nodes in order of survival.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.engine.costs import Floats
from forerun.engine.rounds import LEVELS

FIRST = 1 - 0.4 ** np.array(LEVELS, dtype=float)  # of a drafter never asked: worth trying out
PRIOR = 4  # drafts of its own for which a request counts what is known of all
WINDOW, LONG_WINDOW = 16, 256  # drafts remembered, of a request and of all
TRUST = 8.0  # promised tokens that are believed from the start
TRUST_WINDOW, LONG_TRUST_WINDOW = 64.0, 512.0  # promised tokens remembered
MAX_NODES = LEVELS[-1]
PLACES_N = np.arange(1.0, MAX_NODES + 1)
ENDS_L = np.array(LEVELS) - 1


class Outlook:
    """Of one request, or of all together.

    worths_L: mean worth of a draft cut to so many nodes.
    asked_at: the last step in which the drafter was asked. probes: steps left of a probe.
    """

    __slots__ = (
        "_accepted",
        "_drafts",
        "_promised",
        "_trust_window",
        "_window",
        "asked_at",
        "probes",
        "worths_L",
    )

    def __init__(self, all_requests: Outlook | None = None) -> None:
        """Of a request, as far as it is known from all requests; without them, of all."""
        self.asked_at = -1
        self.probes = 0
        self._promised = self._accepted = TRUST
        if all_requests:
            self.worths_L = all_requests.worths_L.copy()
            self._drafts, self._window, self._trust_window = PRIOR, WINDOW, TRUST_WINDOW
            self._accepted *= all_requests.honesty
        else:
            self.worths_L = FIRST.copy()
            self._drafts, self._window, self._trust_window = 1, LONG_WINDOW, LONG_TRUST_WINDOW

    @property
    def honesty(self) -> float:
        """Accepted tokens for each that was promised."""
        return self._accepted / self._promised

    def expect(self, worth_L: Floats) -> None:
        """Learn from what a draft promised."""
        self._drafts = min(self._drafts + 1, self._window)
        self.worths_L += (worth_L - self.worths_L) / self._drafts

    def settle(self, promised: float, accepted: int) -> None:
        """Learn from what became of the nodes that were verified."""
        if self._promised > self._trust_window:
            self._promised *= 0.5
            self._accepted *= 0.5
        self._promised += promised
        self._accepted += accepted


def worths(
    survivals: Sequence[Sequence[float]],
    budgets: Sequence[int],
    whole: Sequence[bool],
    honesties: Sequence[float],
    price: float,
) -> Floats:
    """What each draft is worth at each level, [D, L].

    A draft as large as its budget would have gone on: as its survival decayed so far.
    whole: drafts of which all nodes must be bought.
    """
    chance_DN = np.zeros((len(survivals), MAX_NODES))
    for row_N, survival, budget in zip(chance_DN, survivals, budgets, strict=True):
        size = len(survival)
        if size:
            row_N[:size] = sorted(survival, reverse=True)
            if size >= budget:
                row_N[size:] = row_N[size - 1] ** (PLACES_N[size:] / size)
    gains_DN = chance_DN * np.array(honesties)[:, None] - price
    gains_DN[chance_DN == 0] = 0  # no nodes
    least_D1 = np.where(whole, -np.inf, 0.0)[:, None]
    found: Floats = np.maximum(gains_DN, least_D1).cumsum(1)[:, ENDS_L]
    return found
