"""Whether the plan is as fast as the best fixed setting: all of them in turn, pass by pass.

    python -m bench.settings corpus --workload all          # nodes from 1 to 64 beside the plan
    python -m bench.settings eagle3 --batch 8
    python -m bench.settings --draft auto --draft corpus:smollm2-135m --workload mix

A grid names a drafter and its fixed settings; drafts of one's own run under the plan. Engines
answer the same groups of prompts at the same time (`tune/race.py`), so a machine that changes its
speed does so for all. The best of many is partly luck: beside it stands the setting that is best
on the other groups ("chosen"), which is what somebody who tunes by hand would have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.models import hub
from forerun.tune.bench import PLAIN
from forerun.tune.race import Lane, race
from forerun.tune.workloads import BUILT_IN, load_workload

MODEL = "smollm2-135m"
SMALL, LARGE = (1, 2, 3, 4, 6, 8, 10), (12, 16, 24, 32, 48, 64)


def _trees(kind: str) -> list[str]:
    chains = [f"{kind}:{MODEL},k={k}" for k in SMALL[:5]]
    sizes = itertools.product((2, 4, 6), (4, 8, 16, 32, 64))
    return [*chains, *(f"{kind}:{MODEL},k={k},top_k=4,nodes={n}" for k, n in sizes if n >= k)]


GRIDS = {
    "ngram": ("ngram", [f"ngram:k={k}" for k in SMALL]),
    "corpus": (
        f"corpus:{MODEL},nodes=64",
        [f"corpus:{MODEL},nodes={n}" for n in SMALL + LARGE],
    ),
    "eagle3": (f"eagle3:{MODEL},k=6,top_k=4,nodes=64", _trees("eagle3")),
}


@dataclass
class Table:
    """Seconds of every spec, by group of prompts. plan: specs that run under it. fixed: those whose
    every node is checked. same: answers with the tokens of plain decoding, of so many."""

    workload: str
    batch: int
    plan: list[str]
    fixed: list[str]
    tokens: int = 0
    same: int = 0
    answers: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def speedup(self, spec: str) -> float:
        """Over plain decoding, all groups together."""
        return sum(self.seconds[PLAIN]) / sum(self.seconds[spec])

    def best(self) -> str:
        """The fixed setting that was fastest."""
        return max(self.fixed, key=self.speedup)

    def chosen(self) -> float:
        """Seconds of every group with the setting that is best on the others."""
        whole = {spec: sum(self.seconds[spec]) for spec in self.fixed}
        found = 0.0
        for each in zip(*(self.seconds[spec] for spec in self.fixed), strict=True):
            here = dict(zip(self.fixed, each, strict=True))
            found += here[min(whole, key=lambda spec: whole[spec] - here[spec])]
        return found

    def against(self, spec: str, other: str) -> tuple[float, float]:
        """How many times as fast one is as another, and the standard error of that."""
        pairs = zip(self.seconds[other], self.seconds[spec], strict=True)
        logs = [math.log(theirs / ours) for theirs, ours in pairs]
        error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        return math.exp(fmean(logs)), error


class Contest:
    """Engines for plain decoding, drafts under the plan and fixed settings, on one model."""

    def __init__(
        self,
        model: hub.LoadedModel,
        plan: Sequence[str],
        fixed: Sequence[str],
        params: SamplingParams,
    ) -> None:
        self._model = model
        self._plan, self._fixed, self._params = list(plan), list(fixed), params

    def run(self, workload: str, batch: int, prompts: int) -> Table:
        """Engines are made anew: none has seen the answers before."""
        table = Table(workload, batch, self._plan, [spec + "!" for spec in self._fixed])
        engines = self._engines(batch)
        table.seconds = {spec: [] for spec in engines}
        whole = [each.encode(self._model.tokenizer) for each in load_workload(workload).prompts]
        ids = [whole[place % len(whole)] for place in range(prompts)]
        for number, begin in enumerate(range(0, prompts, batch)):
            group = ids[begin : begin + batch]
            params = [
                self._params.model_copy(update={"seed": begin + i}) for i in range(len(group))
            ]
            lanes = {spec: Lane(engine, group, params) for spec, engine in engines.items()}
            order = list(lanes.values())
            race(order if number % 2 else order[::-1])
            self._note(table, lanes)
        return table

    def _note(self, table: Table, lanes: dict[str, Lane]) -> None:
        plain = lanes[PLAIN].answers
        table.tokens += sum(map(len, plain))
        for spec, lane in lanes.items():
            table.seconds[spec].append(lane.seconds)
            if spec != PLAIN:
                table.same += sum(a == b for a, b in zip(plain, lane.answers, strict=True))
                table.answers += len(plain)

    def _engines(self, batch: int) -> dict[str, Engine]:
        def engine(spec: str | None, static: bool = False) -> Engine:
            llm = LLM(self._model, spec, max_num_seqs=batch, kv_tokens=batch * 2048, static=static)
            return llm.engine

        return {
            PLAIN: engine(None),
            **{spec: engine(spec) for spec in self._plan},
            **{spec + "!": engine(spec, static=True) for spec in self._fixed},
        }


def show(table: Table) -> None:
    """Print one workload."""
    plain = table.tokens / sum(table.seconds[PLAIN])
    print(
        f"{table.workload}, batch {table.batch}: plain {plain:.0f} tok/s, "
        f"{table.same}/{table.answers} texts same"
    )
    for spec in [*table.plan, *table.fixed]:
        print(f"  {table.speedup(spec):6.3f}x  {spec}")
    for other, spec in itertools.combinations(table.plan, 2):
        ratio, error = table.against(spec, other)
        print(f"  {ratio:.3f} +- {error:.3f}  {spec} over {other}")
    if table.fixed:
        best = table.best()
        for spec in table.plan:
            ours = sum(table.seconds[spec])
            print(
                f"  {spec} over the best fixed ({best}): {sum(table.seconds[best]) / ours:.3f}, "
                f"over the chosen ones: {table.chosen() / ours:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="The plan beside fixed settings.")
    parser.add_argument("grid", nargs="?", choices=list(GRIDS))
    parser.add_argument("--draft", action="append", default=[], help="under the plan")
    parser.add_argument("--fixed", action="append", default=[], help="with every node checked")
    parser.add_argument("--workload", action="append", help="'all' for the seven that are built in")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    plan, fixed = list(arguments.draft), list(arguments.fixed)
    if arguments.grid:
        draft, settings = GRIDS[arguments.grid]
        plan.append(draft)
        fixed += settings
    if not plan:
        parser.error("name a grid or a --draft")
    workloads = arguments.workload or ["mix"]
    if workloads == ["all"]:
        workloads = list(BUILT_IN)
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
    )
    contest = Contest(hub.load(MODEL, "auto", "auto"), plan, fixed, params)
    tables = []
    for workload in workloads:
        tables.append(contest.run(workload, arguments.batch, arguments.prompts))
        show(tables[-1])
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(table) for table in tables], indent=1))


if __name__ == "__main__":
    main()
