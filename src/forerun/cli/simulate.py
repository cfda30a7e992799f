"""`forerun simulate`: the plan on machines that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.options import option
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table as Shown

    from forerun.simulate.replay import Row
    from forerun.simulate.tables import Table
    from forerun.simulate.traces import Trace

MOST_TEXTS = 512
BATCHES, STATIC = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)  # where nothing was published


def simulate(
    table: Annotated[
        str,
        typer.Argument(
            help="Costs of a machine: h100-eagle3, h100-eagle, mi300x-eagle3, or a TOML file.",
            metavar="TABLE",
        ),
    ],
    trace: Annotated[
        Path | None,
        option("Drafts that 'bench --trace' recorded, instead of the table's.", metavar="FILE"),
    ] = None,
    batch: Annotated[
        str | None, option("Texts at once, as 1,8. [default: as published]", metavar="SIZES")
    ] = None,
    static: Annotated[
        str | None,
        option("Nodes of drafts of fixed size, as 3,8. [default: as published]", metavar="SIZES"),
    ] = None,
    json_file: Annotated[
        Path | None, option("Write all figures there; - is stdout.", "--json", metavar="FILE")
    ] = None,
) -> None:
    """What the plan would do with a drafter on another machine.

    \b
        forerun simulate h100-eagle3
        forerun simulate mine.toml --trace drafts.jsonl --batch 1,8,32 --static 4,16
    """
    batches = options.sizes("--batch", batch) if batch else None
    budgets = options.sizes("--static", static) if static else None
    options.check_files(json_file)

    from rich.console import Console

    from forerun.engine.outlook import MAX_NODES
    from forerun.simulate import replay, tables, traces

    _check("--batch", batches, MOST_TEXTS)
    _check("--static", budgets, MAX_NODES)
    machine = tables.load_table(table)
    drafts = traces.read(trace) if trace else _drafts(machine, table)
    if batches is None:
        batches = _distinct(machine, 0) or list(BATCHES)
    if budgets is None:
        budgets = _distinct(machine, 1) or list(STATIC)
    rows = list(replay.run(machine, drafts, batches, budgets, compare=trace is None))
    console = Console(stderr=json_file == options.STDOUT)
    console.print(f"{machine.name}; {drafts.title}", highlight=False, soft_wrap=True)
    console.print(_shown(rows))
    for line in _origins(machine):
        console.print(line, highlight=False, soft_wrap=True)
    if json_file:
        _write(json_file, machine, drafts, rows)


def _check(name: str, sizes: list[int] | None, most: int) -> None:
    if sizes and not 1 <= min(sizes) <= max(sizes) <= most:
        raise ConfigError(f"{name} {','.join(map(str, sizes))}: give numbers from 1 to {most}")


def _drafts(machine: Table, name: str) -> Trace:
    from forerun.simulate.traces import made_up

    if machine.drafter is None:
        raise ConfigError(f"{name} has no [drafter]; give one, or drafts with --trace FILE")
    return made_up(machine.drafter.acceptance, machine.drafter.claims)


def _distinct(machine: Table, place: int) -> list[int]:
    """Batch sizes (0) or numbers of drafted tokens (1) for which something was published."""
    return list(dict.fromkeys(int(line[place]) for line in machine.published))


def _origins(machine: Table) -> list[str]:
    parts = {"Source": machine.source, "Fitted": machine.fitted, "Assumed": machine.assumed}
    return [f"{name}: {text.strip()}" for name, text in parts.items() if text]


def _shown(rows: list[Row]) -> Shown:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Shown

    shown = Shown(box=SIMPLE_HEAD, pad_edge=False)
    lines = [_cells(row) for row in rows]
    for column in lines[0]:
        shown.add_column(column, justify="right", no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        shown.add_row(*line.values(), end_section=row is rows[-1] or row.draft == "plan")
    return shown


def _cells(row: Row) -> dict[str, str]:
    return {
        "batch": str(row.batch),
        "draft": row.draft,
        "tok/s": f"{row.tok_s:.0f}",
        "speed-up": f"{row.speedup:.2f}x",
        "published": f"{row.published:.2f}x" if row.published else "-",
        "tok/pass": f"{row.tokens_per_pass:.2f}",
        "rows/pass": f"{row.rows_per_pass:.2f}",
        "without": f"{row.plain_share:.0%}",
        "asked": f"{row.asked_share:.0%}",
    }


def _write(file: Path, machine: Table, drafts: Trace, rows: list[Row]) -> None:
    meta: dict[str, Any] = {"table": machine.model_dump(), "drafts": drafts.title}
    text = json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    if file == options.STDOUT:
        print(text, end="")
    else:
        file.write_text(text, encoding="utf-8")
