"""Is speculation ever slower than plain decoding? Cells of a large product, measured in pairs.

A cell is a workload, a draft, a batch size and a temperature. Every pair answers a group of prompts
once plainly and once with the draft, a pass of each in turn, and goes to the file as a line: a run
that was killed goes on where it was. Before, a new engine answers a group that does not count: what
a draft is worth is found out once. A cell is decided as soon as the confidence interval of its
speed-up lies on one side of `LEAST`.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from forerun.core import SamplingParams
from forerun.engine.costs import Costs
from forerun.errors import ConfigError
from forerun.interop import shipped
from forerun.train.jsonl import Journal, read_records
from forerun.tune.adversaries import AlwaysWrong, random_text
from forerun.tune.bench import PLAIN
from forerun.tune.race import Lane, Runner, race
from forerun.tune.workloads import BUILT_IN, load_workload

if TYPE_CHECKING:
    from forerun.models.hub import LoadedModel

BATCHES = (1, 4, 8, 16, 32)
TEMPERATURES = (0.0, 1.0)
WRONG, RANDOM = AlwaysWrong.name, "random"  # the draft and the workload of adversarial cells

LEAST = 0.97  # of the speed of plain decoding
WANTED = 0.99  # median over the cells in which drafts bring nothing
BRINGS = 1.05  # tokens a pass, from which on they bring something

# Pairs after which a cell is looked at, with Student's t at 1 - 0.05 / 6 for so many: whoever looks
# six times, and stops at the first clear answer, is wrong in 5 % of the cells at most (Bonferroni).
LOOKS = {4: 4.857, 6: 3.534, 8: 3.128, 12: 2.820, 16: 2.694, 24: 2.582}
FEWEST, MOST = min(LOOKS), max(LOOKS)

CELLS, OTHERS = 80, 40  # fewest cells of a sample, and of them such that are not adversarial
FIRST_ROUND = 0.6  # share of the time that is planned; the rest is for cells that need more pairs
TOKENS = 64  # of an answer
PROMPTS = 8  # of each workload, the shortest: what prompts take is the same with any draft


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared with plain decoding."""

    workload: str
    draft: str
    batch: int
    temperature: float

    @property
    def adversarial(self) -> bool:
        return self.draft == WRONG or self.workload == RANDOM

    def __str__(self) -> str:
        at = f"batch {self.batch}, temperature {self.temperature:g}"
        return f"{self.draft} on {self.workload}, {at}"


@dataclass(frozen=True, slots=True)
class Pair:
    """One group of prompts, answered plainly and with a draft.

    tokens, passes: with the draft, over all answers. same: answers with the tokens of plain
    decoding, of so many.
    """

    plain_seconds: float
    draft_seconds: float
    tokens: int
    passes: int
    same: int
    answers: int


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a cell. speedup: geometric mean over the pairs; low, high: its interval.

    holds: whether it is at least `LEAST`; None where that is not clear.
    """

    cell: Cell
    pairs: int
    speedup: float
    low: float
    high: float
    holds: bool | None
    tokens_per_pass: float


class Sweep:
    """A sample of cells, and what is known of them; both are in `file`.

    seconds: for which a new sample is drawn. start: makes an engine for a draft and a batch size.
    Raises `ConfigError` where the file is of another sweep.
    """

    def __init__(
        self,
        model: LoadedModel,
        file: Path,
        header: dict[str, Any],
        seed: int,
        costs: Costs,
        start: Callable[[str, int], Runner],
        seconds: float,
    ) -> None:
        self.model = model
        self._seed = seed
        self._costs = costs
        self._start = start
        self._prompts: dict[str, list[list[int]]] = {}
        self._file = file
        with Journal(file):  # half a line at its end is removed
            records = list(read_records(file))
        if records:
            self.pairs = _read(file, records, header)
        else:
            cells = self._draw(seconds)
            self._write({"sweep": header, "cells": [astuple(cell) for cell in cells]})
            self.pairs = {cell: [] for cell in cells}

    @property
    def open(self) -> list[Cell]:
        """Cells that are not decided and may get more pairs, those with fewest first."""
        cells = [
            cell
            for cell, pairs in self.pairs.items()
            if len(pairs) < MOST and judge(pairs)[0] is None
        ]
        return sorted(cells, key=lambda cell: len(self.pairs[cell]))

    def seconds(self, cells: Sequence[Cell]) -> float:
        """About how long the first look at these takes, by the costs of passes."""
        return sum(self._seconds(cell) for cell in cells)

    def run(self, seconds: float) -> Iterator[Cell]:
        """Measure for so long, at most; yields the cell after every pair.

        Every cell has its share of the time that is left; what it does not use is the others'.
        """
        end = time.perf_counter() + seconds
        while (cells := self.open) and (now := time.perf_counter()) < end:
            yield from self._measure(cells[0], now + (end - now) / len(cells), end)

    def results(self) -> list[Result]:
        """Of the cells that have been looked at."""
        return [_result(cell, pairs) for cell, pairs in self.pairs.items() if len(pairs) >= FEWEST]

    def _measure(self, cell: Cell, until: float, end: float) -> Iterator[Cell]:
        pairs = self.pairs[cell]
        engines = [self._start(draft, cell.batch) for draft in (PLAIN, cell.draft)]
        race([self._lane(engine, cell, MOST) for engine in engines])
        while len(pairs) < MOST:
            lanes = [self._lane(engine, cell, len(pairs)) for engine in engines]
            race(lanes if len(pairs) % 2 else lanes[::-1])
            pairs.append(_pair(*lanes))
            self._write({"cell": astuple(cell), **asdict(pairs[-1])})
            yield cell
            now = time.perf_counter()
            if now > end or judge(pairs)[0] is not None or (len(pairs) >= FEWEST and now > until):
                return

    def _write(self, record: dict[str, Any]) -> None:
        with Journal(self._file) as journal:
            journal.append(record)

    def _lane(self, engine: Runner, cell: Cell, number: int) -> Lane:
        """The prompts of a cell's pair `number`, each with its own seed, given to an engine."""
        places = range(number * cell.batch, (number + 1) * cell.batch)
        shortest = self._shortest(cell.workload)
        params = [
            SamplingParams(
                temperature=cell.temperature,
                seed=self._seed + place,
                max_tokens=TOKENS,
                ignore_eos=True,  # so that a batch stays as large as it is
            )
            for place in places
        ]
        return Lane(engine, [shortest[place % len(shortest)] for place in places], params)

    def _shortest(self, workload: str) -> list[list[int]]:
        if workload not in self._prompts:
            is_random = workload == RANDOM
            whole = random_text(RANDOM) if is_random else load_workload(workload)
            encoded = [prompt.encode(self.model.tokenizer, is_random) for prompt in whole.prompts]
            self._prompts[workload] = sorted(encoded, key=len)[:PROMPTS]
        return self._prompts[workload]

    def _draw(self, seconds: float) -> list[Cell]:
        """All adversarial cells and as many others as fit, in an order that is a fair sample
        wherever it is cut."""
        dice = random.Random(self._seed)
        every = product(drafts(self.model))
        drawn = [cell for cell in every if cell.adversarial]
        others = [cell for cell in every if not cell.adversarial]
        dice.shuffle(others)
        least = max(OTHERS, CELLS - len(drawn))
        left = FIRST_ROUND * seconds - self.seconds(drawn)
        for count, cell in enumerate(others):
            left -= self._seconds(cell)
            if count >= least and left < 0:
                break
            drawn.append(cell)
        dice.shuffle(drawn)
        return drawn

    def _seconds(self, cell: Cell) -> float:
        prompts = [round(fmean(map(len, self._shortest(cell.workload))))] * cell.batch
        tokens = TOKENS * self._costs.seconds(prompts, [1] * cell.batch)
        return 2 * (1 + FEWEST) * (self._costs[sum(prompts)] + tokens)


def drafts(model: LoadedModel) -> list[str]:
    """Draft specs that are tried out: those that need no training, all that ship, all together."""
    trained = [f"{kind}:{name}" for kind, name, _ in shipped.every() if name == model.name]
    skipped = max(1, model.target.info.layers // 3)
    return ["ngram", "suffix", f"skip:{skipped}", *trained, "auto", WRONG]


def product(drafts: Sequence[str]) -> list[Cell]:
    """All cells."""
    sizes = list(itertools.product(BATCHES, TEMPERATURES))
    pairs = [*itertools.product(BUILT_IN, drafts), (RANDOM, "ngram")]
    return [Cell(*pair, *size) for pair in pairs for size in sizes]


def judge(pairs: Sequence[Pair]) -> tuple[bool | None, float, float, float]:
    """Whether a cell holds, None where that is not clear, by the first look that decides; the
    speed-up and its interval as they were seen at that look, or at the last one."""
    logs = [math.log(pair.plain_seconds / pair.draft_seconds) for pair in pairs]
    holds: bool | None = None
    mean, margin = 0.0, math.inf
    for count, t in LOOKS.items():
        if count > len(logs) or holds is not None:
            break
        mean = fmean(logs[:count])
        margin = t * stdev(logs[:count]) / math.sqrt(count)
        if mean - margin >= math.log(LEAST):
            holds = True
        elif mean + margin < math.log(LEAST):
            holds = False
    return holds, math.exp(mean), math.exp(mean - margin), math.exp(mean + margin)


def useless(results: Sequence[Result]) -> float | None:
    """The median speed-up of cells in which drafts bring next to nothing; None without any."""
    found = [each.speedup for each in results if each.tokens_per_pass < BRINGS]
    return median(found) if found else None


def others(pairs: Sequence[Pair]) -> int:
    """How many answers have other tokens than plain decoding."""
    return sum(pair.answers - pair.same for pair in pairs)


def _result(cell: Cell, pairs: Sequence[Pair]) -> Result:
    holds, speedup, low, high = judge(pairs)
    tokens, passes = sum(pair.tokens for pair in pairs), sum(pair.passes for pair in pairs)
    return Result(cell, len(pairs), speedup, low, high, holds, tokens / passes)


def _pair(plain: Lane, drafted: Lane) -> Pair:
    same = [a == b for a, b in zip(plain.answers, drafted.answers, strict=True)]
    return Pair(
        plain_seconds=plain.seconds,
        draft_seconds=drafted.seconds,
        tokens=sum(map(len, drafted.answers)),
        passes=drafted.stats.passes,
        same=sum(same),
        answers=len(same),
    )


def _read(
    file: Path, records: Sequence[tuple[str, Any]], header: dict[str, Any]
) -> dict[Cell, list[Pair]]:
    """What an earlier run left."""
    (_, first), *rest = records
    try:
        found = first["sweep"]
        pairs: dict[Cell, list[Pair]] = {Cell(*cell): [] for cell in first["cells"]}
        for _, record in rest:
            pairs[Cell(*record.pop("cell"))].append(Pair(**record))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{file} holds something else than a sweep; choose another file"
        ) from None
    for name, value in header.items():
        if found.get(name) != value:
            raise ConfigError(
                f"{file} is a sweep with {name} {found.get(name)}, not {value}; choose another file"
            )
    return pairs
