"""Engines that answer the same prompts at the same time, one pass of one after one of another.

Where the machine itself changes its speed every few seconds (memory that others use, clocks that
sink), answers one behind the other meet another machine each; passes in turn meet the same one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from forerun.core import SamplingParams, StepStats

if TYPE_CHECKING:
    from forerun.engine.emit import Generation


class Runner(Protocol):
    """What races, as `engine.Engine` does."""

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        ...

    def add(
        self, prompt: Sequence[int], params: SamplingParams, call: int | None = None
    ) -> list[Generation]:
        """Queue a prompt, one of those that are waited for together."""
        ...

    def step(self) -> object:
        """Run one pass."""
        ...


class Lane:
    """One engine, and the group of prompts that it answers.

    seconds: what its own calls took so far.
    """

    def __init__(
        self, engine: Runner, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> None:
        self._engine = engine
        self._generations: list[Generation] = []
        begin = time.perf_counter()
        for prompt, each in zip(prompts, params, strict=True):
            call = self._generations[0].request.call if self._generations else None
            self._generations += engine.add(prompt, each, call)
        self.seconds = time.perf_counter() - begin

    @property
    def running(self) -> bool:
        return self._engine.busy

    def advance(self) -> None:
        """Run one pass."""
        begin = time.perf_counter()
        self._engine.step()
        self.seconds += time.perf_counter() - begin

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of each, in the order of the prompts."""
        requests = [generation.request for generation in self._generations]
        return [request.tokens[request.prompt_length :] for request in requests]

    @property
    def stats(self) -> StepStats:
        """Counters of all answers together."""
        total = StepStats()
        for generation in self._generations:
            total.add(generation.stats)
        return total


def race(lanes: Sequence[Lane]) -> None:
    """Let all of them answer. It is always the turn of the one that took the least time so far,
    so that what one of them needs less of, more passes make up for."""
    while running := [lane for lane in lanes if lane.running]:
        min(running, key=lambda lane: lane.seconds).advance()
