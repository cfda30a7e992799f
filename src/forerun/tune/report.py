"""Results on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from forerun.tune.bench import PLAIN, Row
from forerun.tune.explain import explain

DROPPED_FIRST = ("memory", "tok/pass", "draft/verify/other", "TTFT")  # on narrow screens


def to_json(rows: Sequence[Row], meta: dict[str, Any]) -> str:
    """One object: `meta` and `rows`."""
    return json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def decode_speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times faster than plain decoding a token comes once the first is there."""
    cell = (row.workload, row.batch)
    plain = next(r for r in rows if r.spec == PLAIN and (r.workload, r.batch) == cell)
    return plain.tpot_ms / row.tpot_ms if plain.tpot_ms and row.tpot_ms else None


def cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """What tables show of a row, by column."""
    plain = row.spec == PLAIN
    decode = decode_speedup(row, rows)
    compared = row.prompts_compared
    return {
        "workload": row.workload,
        "batch": str(row.batch),
        "draft": row.spec,
        "tok/s": f"{row.tok_s:.1f}",
        "speed-up": f"{row.speedup:.2f}x",
        "decode": f"{decode:.2f}x" if decode else "-",
        "accepted": "-" if plain else f"{row.acceptance_length:.2f}",
        "tok/pass": f"{row.tokens_per_pass:.2f}",
        "draft/verify/other": f"{row.draft_ms:.1f}/{row.verify_ms:.1f}/{row.other_ms:.1f}",
        "TTFT": f"{row.ttft_ms:.0f} ms",
        "same text": f"{row.identical} of {compared}" if compared else "-",
        "memory": f"{row.peak_rss_mb:.0f} MB",
    }


def table(rows: Sequence[Row], width: int) -> Table:
    """All rows, a gap between workloads and batch sizes, the fastest of each in bold.

    width: columns of the screen; on a narrow one, some figures are left out.
    """
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    lines = [cells(row, rows) for row in rows]
    columns = _fitting(lines, width)
    for column in columns:
        text = column in ("workload", "draft")
        shown.add_column(column, justify="left" if text else "right", no_wrap=not text)
    for row, line, following in zip(rows, lines, [*rows[1:], None], strict=True):
        rivals = [r for r in rows if (r.workload, r.batch) == (row.workload, row.batch)]
        fastest = max(rivals, key=lambda r: r.tok_s) is row
        shown.add_row(
            *(line[column] for column in columns),
            end_section=following is None or following.spec == PLAIN,
            style="bold" if fastest else None,
        )
    return shown


def _fitting(lines: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns of a table that fit on the screen, or all that must be there."""
    columns = list(lines[0])
    for dropped in DROPPED_FIRST:
        widths = [max(len(column), *(len(line[column]) for line in lines)) for column in columns]
        if sum(widths) + 3 * len(columns) <= width:
            break
        columns.remove(dropped)
    return columns


def explanations(rows: Sequence[Row]) -> list[str]:
    """One line for each draft, workload and batch size: why it pays, or why not."""
    plain = {(row.workload, row.batch): row for row in rows if row.spec == PLAIN}
    return [explain(row, plain[row.workload, row.batch]) for row in rows if row.spec != PLAIN]


def summary(rows: Sequence[Row], meta: dict[str, Any]) -> str:
    """What the figures say, and what the rule that accepted the drafts promises."""
    drafted = [row for row in rows if row.spec != PLAIN]
    if not drafted:
        return f"Plain decoding only: {rows[0].tok_s:.1f} tok/s."
    best = max(drafted, key=lambda row: row.speedup)
    compared = sum(row.prompts_compared for row in drafted)
    same = sum(row.identical for row in drafted)
    costs = f" Costs of passes: {meta['costs']}." if meta["costs"] else ""
    return (
        f"Largest speed-up: {best.speedup:.2f}x, {best.spec} on {best.workload} at batch "
        f"{best.batch}. Same tokens as plain decoding: {same} of {compared} answers; "
        f"{meta['promise']}.{costs}"
    )
