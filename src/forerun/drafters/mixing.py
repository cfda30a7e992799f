"""Several beliefs in one token, combined by weights that are learned from what really followed.

A log-linear mixture (Hinton 2002 calls it a product of experts): the logarithms of the beliefs are
added with weights, as compressors of the PAQ family combine their models (Mattern 2012, "Mixing
strategies in data compression"), and all that may follow is scaled to sum up to 1, "none of the
named" included. Which weights, the pattern says: who names the token, who names others instead, who
knows nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from operator import mul

SILENT, OTHERS, NAMED = range(3)  # what a source says of a token, in base 3 a pattern

LEAST = 1e-3  # smaller beliefs are cut to this
LOG_LEAST = log(LEAST)
LARGEST = 30.0  # score, up or down
DOUBT = 0.7  # score that a token loses at first with each source that names only others
PRIOR = 1.0  # variance of a weight before anything is learned
DRIFT = 1e-5  # by which each decision raises it, so that old ones fade


def score(belief: float) -> float:
    """The logarithm of a belief."""
    return log(belief) if belief > LEAST else LOG_LEAST


class Weights:
    """Those of one pattern: a mean and a variance each, corrected by every decision.

    Logistic regression in one pass, by steps as large as the weights are uncertain (Spiegelhalter
    and Lauritzen 1990, with independent weights): it settles within dozens of decisions, and there
    is no rate to choose.
    """

    __slots__ = ("_variance", "mean")

    def __init__(self, mean: list[float]) -> None:
        self.mean = mean
        self._variance = [PRIOR] * len(mean)

    def raw(self, inputs: Sequence[float]) -> float:
        """How likely a token is, before all that may follow are scaled. inputs: the scores of the
        sources, 0 of those that are silent, and 1 for the bias."""
        total = sum(map(mul, self.mean, inputs))
        return exp(total if -LARGEST < total < LARGEST else LARGEST if total > 0 else -LARGEST)

    def learn(self, inputs: Sequence[float], chance: float, right: bool) -> None:
        """One more decision, where the token was said to have a chance."""
        mean, variance = self.mean, self._variance
        gains = list(map(mul, variance, inputs))
        slope = chance * (1 - chance)
        scale = 1 / (1 + slope * sum(map(mul, gains, inputs)))
        step, shrink = scale * (right - chance), scale * slope
        for i, gain in enumerate(gains):
            mean[i] += step * gain
            variance[i] = min(PRIOR, variance[i] - shrink * gain * gain + DRIFT)


class Mixer(dict[int, Weights]):
    """The weights of all patterns of so many sources: one for each source, and a bias.

    At first a score is the mean of those who name the token, less a doubt for each source that
    names only others; that of "none of them" is the mean of what the sources leave over.
    """

    def __init__(self, sources: int) -> None:
        super().__init__()
        self._sources = sources

    def __missing__(self, pattern: int) -> Weights:
        says = [pattern // 3**source % 3 for source in range(self._sources)]
        asked = NAMED if NAMED in says else OTHERS
        share = 1 / max(1, says.count(asked))
        doubt = DOUBT * says.count(OTHERS) if asked == NAMED else 0.0
        self[pattern] = found = Weights([*(share * (say == asked) for say in says), -doubt])
        return found
