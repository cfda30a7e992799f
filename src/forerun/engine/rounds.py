"""What a drafter's round costs, by the requests that it is for and the nodes that it may propose.

Nothing is known before it was asked: what it was never asked for is taken to be cheap, so that it is
tried once. D requests asked, L levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forerun.engine.costs import Floats

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # budgets that a drafter is asked with
WINDOW = 32  # rounds at a level
MOST = 2.0  # times the estimate, as which a longer round counts: something interrupted it
FIXED = 0.5  # share of a round that is the same for any number of requests, until it was seen
DOUBT = 0.25  # how much of the squared number of requests that guess weighs


class Rounds:
    """Per level, seconds = a + b * requests, from the running means and covariance of both."""

    def __init__(self) -> None:
        size = len(LEVELS)
        self._count = np.zeros(size, dtype=int)
        self._requests, self._seconds = np.zeros(size), np.zeros(size)
        self._variance, self._covariance = np.zeros(size), np.zeros(size)
        self._table_DL: Floats = np.empty((0, size))

    def learn(self, level: int, requests: int, seconds: float) -> None:
        """A round took so long; level: index of its budget."""
        self._count[level] += 1
        step = 1 / min(self._count[level], WINDOW)
        if step < 1:
            seconds = min(seconds, MOST * self.seconds(requests)[requests - 1, level])
        more = requests - self._requests[level]
        longer = seconds - self._seconds[level]
        self._requests[level] += step * more
        self._seconds[level] += step * longer
        keep = 1 - step
        self._variance[level] = keep * (self._variance[level] + step * more * more)
        self._covariance[level] = keep * (self._covariance[level] + step * more * longer)
        self._table_DL = self._table_DL[:0]

    def seconds(self, requests: int) -> Floats:
        """Seconds of a round for 1, 2, ... requests (rows) at each level (columns); at least up to
        `requests`."""
        if len(self._table_DL) < requests:
            self._table_DL = self._fit(max(requests, len(self._table_DL)))
        return self._table_DL

    def _fit(self, requests: int) -> Floats:
        known = np.flatnonzero(self._count)
        if not len(known):
            return np.zeros((requests, len(LEVELS)))
        mean, seconds = self._requests[known], self._seconds[known]
        doubt = DOUBT * mean**2
        guess = (1 - FIXED) * seconds / mean
        slope = (self._covariance[known] + doubt * guess) / (self._variance[known] + doubt)
        slope = np.clip(slope, 0, seconds / mean)
        counts_D = np.arange(1, requests + 1)
        table_DK = (seconds - slope * mean) + slope * counts_D[:, None]
        return _between(table_DK, known)


def _between(table_DK: Floats, known: NDArray[np.intp]) -> Floats:
    """Costs at all levels from those at the known ones: straight lines between them, from nothing
    below them, and as much as the last above them."""
    nodes = [0, *(LEVELS[level] for level in known)]
    return np.array([np.interp(LEVELS, nodes, [0.0, *row]) for row in table_DK])
