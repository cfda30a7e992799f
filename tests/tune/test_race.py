"""Engines in turn: the same machine for each, whatever it does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.tune import race as module
from forerun.tune.race import Lane, race
from tiny import tiny_llama


class Machine:
    """Its clock runs `slow` times as fast between the given times."""

    def __init__(self, slow: float, begin: float, end: float) -> None:
        self.now = 0.0
        self.slow, self.begin, self.end = slow, begin, end

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * (self.slow if self.begin <= self.now < self.end else 1)


class Worker:
    """Needs `steps` of so many seconds on a machine at its best."""

    def __init__(self, machine: Machine, steps: int, seconds: float) -> None:
        self.machine, self.steps, self.seconds = machine, steps, seconds

    @property
    def busy(self) -> bool:
        return self.steps > 0

    def add(self, prompt: Any, params: Any, call: Any) -> list[Any]:
        return []

    def step(self) -> None:
        self.steps -= 1
        self.machine.work(self.seconds)


def seconds_of(machine: Machine, *workers: Worker, in_turn: bool) -> list[float]:
    lanes = [Lane(cast(Any, worker), [[1]], [SamplingParams()]) for worker in workers]
    for group in [lanes] if in_turn else [[lane] for lane in lanes]:
        race(group)
    return [lane.seconds for lane in lanes]


@pytest.mark.parametrize("seconds", [1.0, 0.5, 3.0])
def test_a_slow_stretch_of_the_machine_is_everybodys(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    def ratio(in_turn: bool) -> float:
        machine = Machine(2.0, begin=40.0, end=120.0)
        monkeypatch.setattr(module, "time", machine)
        steps = 120
        workers = [Worker(machine, steps, 1.0), Worker(machine, round(steps / seconds), seconds)]
        plain, other = seconds_of(machine, *workers, in_turn=in_turn)
        return plain / other

    assert ratio(in_turn=True) == pytest.approx(1, abs=0.03)
    assert abs(ratio(in_turn=False) - 1) > 0.15, "one behind the other meet other machines"


def test_what_one_saves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1.0, 0.0, 0.0)
    monkeypatch.setattr(module, "time", machine)
    assert seconds_of(machine, Worker(machine, 9, 2.0), Worker(machine, 6, 1.0), in_turn=True) == [
        18.0,
        6.0,
    ]


def test_engines_answer_in_turn_as_they_do_alone(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path, seed=3)
    prompts = [[1, 2, 3, 4], [5, 6, 5, 6, 5]]
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=12, ignore_eos=True) for seed in (3, 4)
    ]
    alone = LLM(model).generate(prompts, params)
    engines = [LLM(model, draft=draft).engine for draft in (None, "ngram")]
    lanes = [Lane(engine, prompts, params) for engine in engines]
    assert all(lane.running for lane in lanes)
    race(lanes)
    for lane in lanes:
        assert not lane.running
        assert lane.answers == [each.outputs[0].token_ids for each in alone]
        assert lane.stats.emitted_tokens == 24
        assert lane.seconds > 0
