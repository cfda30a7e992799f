"""A sweep over engines whose time is told: what is drawn, judged, written and gone on with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forerun.core import SamplingParams, StepStats
from forerun.engine.costs import Costs
from forerun.errors import ConfigError
from forerun.tune import race, sweep
from forerun.tune.sweep import FEWEST, LOOKS, MOST, Cell, Pair, Sweep, judge, product, useless

HEADER = {"model": "fake", "seed": 0}
COSTS = Costs({1: 0.01, 64: 0.02})


class Tokens:
    """A tokenizer whose ids are the characters."""

    has_chat_template = False

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


class FakeEngine:
    """Answers everything in one step of `seconds`, with four tokens per prompt."""

    def __init__(self, lab: Lab, spec: str, size: int) -> None:
        self.lab, self.spec, self.size = lab, spec, size
        self.waiting: list[Any] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt: list[int], params: SamplingParams, call: int | None) -> list[Any]:
        request = SimpleNamespace(
            tokens=list(prompt),
            prompt_length=len(prompt),
            params=params,
            seed=params.seed,
            call=call,
        )
        self.waiting.append(SimpleNamespace(request=request, stats=StepStats()))
        return self.waiting[-1:]

    def step(self) -> None:
        lab, spec = self.lab, self.spec
        assert len(self.waiting) == self.size
        for each in self.waiting:
            each.request.tokens += [1, 2, 3, 5 if spec in lab.other else 4]
            each.stats.passes = 4 if spec in ("none", "wrong") else 2
        first = self.waiting[0].request
        if first.seed < MOST * self.size:  # else it warms up
            lab.now += 1.0 if spec == "none" else lab.seconds.get(spec, 0.5)
            lab.calls.append((spec, self.size, first.seed))
        self.waiting = []


class Lab:
    """A model, and engines that take a second plainly and `seconds` with a draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seconds = {"wrong": 1.2}  # by draft; the others take 0.5
        self.other: set[str] = set()  # drafts that change the text
        self.calls: list[tuple[str, int, int | None]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(race, "time", clock)
        monkeypatch.setattr(sweep, "time", clock)
        info = SimpleNamespace(layers=3)
        target = SimpleNamespace(info=info)
        self.model: Any = SimpleNamespace(name="fake", target=target, tokenizer=Tokens())

    def start(self, spec: str, size: int) -> FakeEngine:
        return FakeEngine(self, spec, size)

    def sweep(self, file: Path, seconds: float = 60.0, header: dict[str, Any] = HEADER) -> Sweep:
        return Sweep(self.model, file, header, 0, COSTS, cast(Any, self.start), seconds)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    return Lab(monkeypatch)


@pytest.mark.parametrize("looks", LOOKS.items())
def test_the_factors_are_those_of_student(looks: tuple[int, float]) -> None:
    count, t = looks
    freedom = count - 1
    scale = math.gamma(count / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    step = t / 20_000
    density = [(1 + (i * step) ** 2 / freedom) ** (-count / 2) for i in range(20_001)]
    below = 0.5 + scale * step * (sum(density) - (density[0] + density[-1]) / 2)
    assert below == pytest.approx(1 - 0.05 / len(LOOKS), abs=1e-5)


def pairs(*ratios: float) -> list[Pair]:
    return [Pair(ratio, 1.0, 4, 4, 1, 1) for ratio in ratios]


def test_a_cell_is_decided_when_its_interval_is_clear() -> None:
    assert judge(pairs(1.0, 1.0, 1.0))[0] is None  # too few
    assert judge(pairs(1.0, 1.001, 0.999, 1.0))[0] is True
    assert judge(pairs(0.9, 0.901, 0.899, 0.9))[0] is False
    holds, speedup, low, high = judge(pairs(0.95, 1.0, 0.95, 1.0))
    assert holds is None
    assert low < 0.97 < speedup < high
    # what comes after the look that decided changes nothing, nor do pairs between two looks
    assert judge(pairs(1.0, 1.001, 0.999, 1.0, 0.1, 0.1))[0] is True
    assert judge(pairs(0.95, 1.0, 0.95, 1.0, 9.0)) == judge(pairs(0.95, 1.0, 0.95, 1.0))


def test_all_adversarial_cells_are_drawn_and_enough_others(lab: Lab, tmp_path: Path) -> None:
    drawn = list(lab.sweep(tmp_path / "short.jsonl", seconds=1.0).pairs)
    every = product(sweep.drafts(lab.model))
    assert len(set(every)) == len(every)
    adversarial = {cell for cell in every if cell.adversarial}
    assert adversarial == {cell for cell in drawn if cell.adversarial}
    assert len(drawn) == len(set(drawn)) == len(adversarial) + sweep.OTHERS
    assert len(drawn) >= sweep.CELLS
    # spread, so that a run that is cut short has seen some of both
    assert 10 < sum(cell.adversarial for cell in drawn[:40]) < 40
    assert drawn == list(lab.sweep(tmp_path / "again.jsonl", seconds=1.0).pairs)
    assert set(lab.sweep(tmp_path / "long.jsonl", seconds=1e6).pairs) == set(every)


def test_a_run_that_was_stopped_goes_on(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    run = lab.sweep(file).run(1e6)
    for _ in range(FEWEST + 2):
        next(run)
    with file.open("a") as half:
        half.write('{"cell": ["chat", "ng')
    before = len(lab.calls)
    again = lab.sweep(file)
    assert sum(map(len, again.pairs.values())) == FEWEST + 2
    assert len(lab.calls) == before
    list(again.run(1e6))
    assert again.open == []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 1 + sum(map(len, again.pairs.values()))
    places = [call for call in lab.calls if call[0] != "none"]
    assert {tuple(line["cell"]) for line in lines[1:]} == {astuple(cell) for cell in again.pairs}
    assert len(places) == len(lines) - 1, "nothing was measured twice"
    list(lab.sweep(file).run(1e6))
    assert len(lab.calls) == 2 * len(places)


def test_time_is_kept_and_shared(lab: Lab, tmp_path: Path) -> None:
    cells = lab.sweep(tmp_path / "sweep.jsonl")
    list(cells.run(20.0))
    assert lab.now < 20 + 2.2
    begun = [pairs for pairs in cells.pairs.values() if pairs]
    assert len(begun) > 1


def test_results(lab: Lab, tmp_path: Path) -> None:
    lab.other = {"suffix"}
    cells = lab.sweep(tmp_path / "sweep.jsonl")
    list(cells.run(1e6))
    for result in cells.results():
        wrong = result.cell.draft == "wrong"
        assert result.holds is not wrong
        assert result.speedup == pytest.approx(1 / 1.2 if wrong else 2)
        assert result.tokens_per_pass == (1 if wrong else 2)
        different = sweep.others(cells.pairs[result.cell])
        assert different == (result.cell.batch * FEWEST if result.cell.draft == "suffix" else 0)
    assert useless(cells.results()) == pytest.approx(1 / 1.2)
    assert useless([]) is None


def test_what_stays_unclear_gets_pairs_until_there_are_enough(lab: Lab, tmp_path: Path) -> None:
    lab.seconds["wrong"] = 1.0
    cells = lab.sweep(tmp_path / "sweep.jsonl")
    cell = next(cell for cell in cells.pairs if cell.draft == "wrong")
    cells.pairs = {cell: []}
    for number, _ in enumerate(cells.run(1e6)):
        lab.seconds["wrong"] = 1.1 if number % 2 else 0.95
    assert len(cells.pairs[cell]) == MOST
    assert judge(cells.pairs[cell])[0] is None
    seeds = [seed for spec, _, seed in lab.calls if spec == "wrong"]
    assert len(set(seeds)) == MOST, "every pair has its own seeds"


def test_another_sweep_is_refused(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    lab.sweep(file)
    with pytest.raises(ConfigError, match="a sweep with seed 0, not 1"):
        lab.sweep(file, header=HEADER | {"seed": 1})
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match="something else than a sweep"):
        lab.sweep(file)


def test_cells_say_what_they_are() -> None:
    assert str(Cell("chat", "wrong", 8, 1.0)) == "wrong on chat, batch 8, temperature 1"
