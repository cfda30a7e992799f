"""Exact laws: every decision that a piece of code leaves to chance is tried, with its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Chance:
    """Decides as a script says, then takes the first possible option and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.taken: tuple[int, ...] = ()
        self.probability = 1.0
        self.untried: list[tuple[int, ...]] = []

    def pick(self, probabilities: Sequence[float]) -> int:
        """The index of one of the options; those of probability 0 are never taken."""
        possible = [i for i, chance in enumerate(probabilities) if chance > 0]
        if len(self.taken) < len(self.script):
            option = self.script[len(self.taken)]
        else:
            option = possible[0]
            self.untried += [(*self.taken, other) for other in possible[1:]]
        self.taken += (option,)
        self.probability *= probabilities[option]
        return option

    def flip(self, chance: float) -> bool:
        return self.pick((1 - chance, chance)) == 1


def outcomes(run: Callable[[Chance], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of `run` with its probability."""
    untried: list[tuple[int, ...]] = [()]
    while untried:
        chance = Chance(untried.pop())
        result = run(chance)
        untried += chance.untried
        yield chance.probability, result


class Toy:
    """A language model by table: random float64 logits for every prefix."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.0) -> None:
        self.vocab = vocab
        self.seed = seed
        self.spread = spread
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> Tensor:
        key = tuple(prefix)
        if key not in self.known:
            state = self.seed
            for token in key:
                state = (state * 1_000_003 + token + 1) % 2**61
            generator = torch.Generator().manual_seed(state)
            logits = torch.randn(self.vocab, generator=generator, dtype=torch.float64)
            self.known[key] = self.spread * logits
        return self.known[key]

    def probs(self, prefix: Sequence[int]) -> Tensor:
        return self.logits(prefix).softmax(-1)
