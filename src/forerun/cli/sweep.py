"""`forerun bench --sweep FILE`: many cells, each at least as fast as plain decoding?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from forerun.cli.progress import Line, duration
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.engine.engine import Engine
    from forerun.models.hub import LoadedModel
    from forerun.tune.sweep import Result, Sweep

# What a sweep can be told; the rest it chooses itself.
OPTIONS = ("sweep_file", "budget", "model", "seed", "kv_tokens", "dtype", "device")
BUDGET = "1h"


def check_options(context: typer.Context, sweeps: bool) -> None:
    """Refuse what was given and has no meaning. Raises `ConfigError`."""
    given = [name for name in context.params if _is_given(context, name)]
    if not sweeps and "budget" in given:
        raise ConfigError("--budget says how long --sweep may take; add it, or leave it out")
    if sweeps and (others := [name for name in given if name not in OPTIONS]):
        name = "--" + others[0].removesuffix("_file").replace("_", "-")
        raise ConfigError(
            f"--sweep chooses drafts, workloads, batch sizes and temperatures; leave out {name}"
        )


def sweep(
    loaded: LoadedModel,
    file: Path,
    seed: int,
    budget: str,
    kv_tokens: int | None,
) -> int:
    """Measure and print; 1 where a cell is slower than plain decoding or a text is another."""
    from forerun.engine.cost_file import measure, source
    from forerun.engine.llm import LLM, new_store
    from forerun.train.recipe import seconds
    from forerun.tune.adversaries import AlwaysWrong
    from forerun.tune.meta import machine
    from forerun.tune.sweep import TOKENS, WRONG, Sweep
    from forerun.versions import versions

    info = loaded.target.info
    here = machine()
    header = {
        "model": loaded.name,
        "dtype": str(info.dtype).removeprefix("torch."),
        "forerun": versions("forerun")["forerun"],
        "machine": here["accelerator"] or here["processor"],
        "threads": here["threads"],
        "seed": seed,
        "tokens": TOKENS,
    }

    def start(spec: str, size: int) -> Engine:
        draft = AlwaysWrong(info.vocab_size) if spec == WRONG else spec
        return LLM(loaded, draft=draft, max_num_seqs=size, kv_tokens=kv_tokens).engine

    costs = measure(loaded.target, new_store(loaded.target, 1, kv_tokens))
    wanted = seconds(budget)
    print(f"costs of passes: {source(loaded.target)}", file=sys.stderr)
    cells = Sweep(loaded, file, header, seed, costs, start, wanted)
    try:
        _run(cells, wanted)
    finally:  # also what was finished before Ctrl-C or an error
        failed = _show(cells)
    return 1 if failed else 0


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run(sweep: Sweep, seconds: float) -> None:
    from forerun.tune.sweep import judge

    line = Line()
    line.say(f"{len(sweep.pairs)} cells, {_state(sweep)}; {_forecast(sweep, seconds)}")
    begin = perf_counter()
    for cell in sweep.run(seconds):
        pairs = sweep.pairs[cell]
        holds, speedup, low, high = judge(pairs)
        left = duration(max(0.0, seconds - (perf_counter() - begin)))
        seen = f"{speedup:.3f}x ({low:.3f} to {high:.3f})"
        if holds is False or pairs[-1].same < pairs[-1].answers:
            different = pairs[-1].answers - pairs[-1].same
            line.say(f"{cell}, pair {len(pairs)}: {seen}, {different} other texts")
        elif line.due:
            line.show(f"{_state(sweep)}, {left} left at most; {cell}, pair {len(pairs)}")
    line.end()


def _state(sweep: Sweep) -> str:
    from forerun.tune.sweep import judge

    decided = sum(judge(pairs)[0] is not None for pairs in sweep.pairs.values())
    begun = sum(bool(pairs) for pairs in sweep.pairs.values())
    return f"{begun} begun, {decided} decided"


def _forecast(sweep: Sweep, seconds: float) -> str:
    """Whether all cells can be looked at."""
    needed = sweep.seconds([cell for cell, pairs in sweep.pairs.items() if not pairs])
    if needed <= seconds:
        return f"a first look at all takes about {duration(needed)} of {duration(seconds)}"
    return (
        f"a first look at all takes about {duration(needed)}, {duration(seconds)} are given: "
        "the same command goes on where this run ends"
    )


def _show(sweep: Sweep) -> bool:
    """Print what was found; whether something is wrong."""
    from rich.console import Console

    from forerun.tune.sweep import LEAST, WANTED, others, useless

    results = sweep.results()
    failed = [each for each in results if each.holds is False]
    open_ = [each for each in results if each.holds is None]
    other = {cell: different for cell, pairs in sweep.pairs.items() if (different := others(pairs))}
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if failed or open_:
        console.print(_table([*failed, *open_]))
    for cell, different in other.items():
        console.print(f"{different} texts differ: {cell}", highlight=False, soft_wrap=True)
    held, seen = len(results) - len(failed) - len(open_), len(sweep.pairs)
    middle = useless(results)
    parts = [
        f"{held} of {seen} cells are at least {LEAST}x plain, {len(failed)} are not, "
        f"{len(open_)} are undecided, {seen - len(results)} were not looked at.",
        "No cell without use for drafts was seen."
        if middle is None
        else f"Median where drafts bring next to nothing: {middle:.3f}x ({WANTED} is wanted).",
        f"Texts that are not those of plain decoding: {sum(other.values())}.",
    ]
    console.print("\n".join(parts), highlight=False, soft_wrap=True)
    return bool(failed or other)


def _table(results: Sequence[Result]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("workload", "draft", "batch", "temperature", "pairs", "speed-up", "95 %", ""):
        shown.add_column(column, justify="left" if column in ("workload", "draft", "") else "right")
    for each in results:
        cell = each.cell
        shown.add_row(
            cell.workload,
            cell.draft,
            str(cell.batch),
            f"{cell.temperature:g}",
            str(each.pairs),
            f"{each.speedup:.3f}x",
            f"{each.low:.3f} to {each.high:.3f}",
            "undecided" if each.holds is None else "too slow",
        )
    return shown
