"""Results as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from forerun.tune.bench import PLAIN, Row
from forerun.tune.metrics import DEFINITIONS
from forerun.tune.report import cells, summary

COLOURS = 8  # custom properties --c0 ... of the style sheet
LABELS, BARS, VALUES = 145, 215, 128  # widths of a bar chart: names, bars, figures
LONGEST_LABEL = 16  # characters
BAR, GAP = 22, 8
CURVE_W, CURVE_H, LEFT, RIGHT, TOP, BOTTOM = 308, 200, 44, 10, 10, 34
MAX_POSITIONS = 16  # acceptance further out is in the table's JSON, not in the curves

STYLE = """
:root { color-scheme: light dark; --text: #1c2127; --soft: #5b6570; --line: #d9dee3; --back: #fff;
  --card: #f6f8fa; --c0: #8b949e; --c1: #1f6feb; --c2: #d9730d; --c3: #1a8f5a; --c4: #a2399e;
  --c5: #c4314b; --c6: #0e8a9c; --c7: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa4af; --line: #343b44;
  --back: #14181d; --card: #1b2027; --c0: #7d8590; --c1: #6cb0ff; --c2: #f5a25d; --c3: #5fd09a;
  --c4: #e08bdc; --c5: #ff8a98; --c6: #5ccfe0; --c7: #d9bc4a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 2rem 1.25rem 4rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: .95rem; margin: 0 0 .5rem; font-weight: 600; }
p { margin: .25rem 0; } .soft, dt, caption { color: var(--soft); }
.lead { font-size: 1.05rem; margin-top: 1rem; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .9rem 1rem; max-width: 100%; }
svg { display: block; max-width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--text); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .soft { fill: var(--soft); } svg .line { stroke: var(--line); }
svg .one { stroke: var(--soft); stroke-dasharray: 4 3; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .25rem 0 .75rem; }
.key span::before { content: ""; display: inline-block; width: .8em; height: .8em;
  border-radius: 2px; margin-right: .45em; background: var(--c); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; font-size: 14px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } tr.first td { border-top: 2px solid var(--line); }
th:nth-child(1), td:nth-child(1), th:nth-child(3), td:nth-child(3) { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(rows: Sequence[Row], meta: dict[str, Any]) -> str:
    """The whole page."""
    specs = list(dict.fromkeys(row.spec for row in rows))
    colours = {spec: f"var(--c{i % COLOURS})" for i, spec in enumerate(specs)}
    title = f"forerun bench: {meta['model']}"
    first = rows[0]
    setting = (
        f"{first.dtype} on {first.device}, temperature {first.temperature:g}, verifier "
        f"{meta['verifier']}, answers of {meta['sampling']['max_tokens']} tokens at most"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(setting)} · {escape(_place(meta))}</p>
<p class="lead">{escape(summary(rows, meta))}</p>
<h2>Speed-up over plain decoding</h2>
<p class="soft">Output tokens per second, prompts included, over those of plain decoding of the same
prompts in the same run.</p>
<div class="cards">{"".join(_bars(cell, rows, colours) for cell in _cells(rows))}</div>
{_acceptance(rows, colours)}
<h2>All figures</h2>
<div class="wide">{_table(rows)}</div>
<h2>What they mean</h2>
<dl>{_list(DEFINITIONS)}</dl>
<h2>Where they come from</h2>
<dl>{_list(_flat(meta))}</dl>
</body>
</html>
"""


def _cells(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of each workload and batch size."""
    for _, group in groupby(rows, key=lambda row: (row.workload, row.batch)):
        yield list(group)


def _name(row: Row) -> str:
    return escape(f"{row.workload}, batch {row.batch}")


def _bars(cell: list[Row], rows: Sequence[Row], colours: dict[str, str]) -> str:
    """A bar per spec; all charts share one scale, so that they can be compared."""
    scale = BARS / max(1.1, *(row.speedup for row in rows))
    height = len(cell) * (BAR + GAP)
    parts = []
    for i, row in enumerate(cell):
        y, width = i * (BAR + GAP), max(1.0, row.speedup * scale)
        parts.append(
            f'<text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">{_short(row.spec)}'
            f"<title>{escape(row.spec)}</title></text>"
            f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" '
            f'fill="{colours[row.spec]}"/>'
            f'<text x="{LABELS + width + 8:.1f}" y="{y + 16}">{row.speedup:.2f}x '
            f'<tspan class="soft">{row.tok_s:.0f} tok/s</tspan></text>'
        )
    one = LABELS + scale
    line = f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="-4" y2="{height}"/>'
    box = f"0 -4 {LABELS + BARS + VALUES} {height + 4}"
    return (
        f'<div class="card"><h3>{_name(cell[0])}</h3><svg viewBox="{box}" '
        f'width="{LABELS + BARS + VALUES}" role="img" aria-label="speed-up on {_name(cell[0])}">'
        f"{line}{''.join(parts)}</svg></div>"
    )


def _short(spec: str) -> str:
    return escape(spec if len(spec) <= LONGEST_LABEL else f"{spec[: LONGEST_LABEL - 1]}…")


def _acceptance(rows: Sequence[Row], colours: dict[str, str]) -> str:
    """The section of curves; empty when nothing was drafted."""
    drawn = [[row for row in cell if row.acceptance_per_position] for cell in _cells(rows)]
    specs = dict.fromkeys(row.spec for cell in drawn for row in cell)
    if not specs:
        return ""
    key = "".join(f'<span style="--c: {colours[s]}">{escape(s)}</span>' for s in specs)
    return (
        "<h2>Acceptance by position</h2>"
        '<p class="soft">Share of the passes with a draft whose accepted tokens reach this far.</p>'
        f'<div class="key">{key}</div>'
        f'<div class="cards">{"".join(_curves(cell, colours) for cell in drawn if cell)}</div>'
    )


def _curves(cell: list[Row], colours: dict[str, str]) -> str:
    longest = max(len(row.acceptance_per_position) for row in cell)
    positions = max(2, min(MAX_POSITIONS, longest))
    width, height = CURVE_W - LEFT - RIGHT, CURVE_H - TOP - BOTTOM

    def x(position: int) -> float:
        return LEFT + width * position / (positions - 1)

    def y(share: float) -> float:
        return TOP + height * (1 - share)

    grid = "".join(
        f'<line class="line" x1="{LEFT}" x2="{CURVE_W - RIGHT}" y1="{y(s)}" y2="{y(s)}"/>'
        f'<text class="soft" x="{LEFT - 6}" y="{y(s) + 4}" text-anchor="end">{s:.0%}</text>'
        for s in (0, 0.5, 1)
    )
    step = 1 if positions <= 8 else 3
    marks = "".join(
        f'<text class="soft" x="{x(i):.1f}" y="{CURVE_H - 17}" text-anchor="middle">{i + 1}</text>'
        for i in range(0, positions, step)
    )
    middle = LEFT + width / 2
    caption = (
        f'<text class="soft" x="{middle}" y="{CURVE_H - 2}" text-anchor="middle">'
        "drafted token number</text>"
    )
    lines = "".join(_curve(row, colours[row.spec], x, y, positions) for row in cell)
    return (
        f'<div class="card"><h3>{_name(cell[0])}</h3><svg viewBox="0 0 {CURVE_W} {CURVE_H}" '
        f'width="{CURVE_W}" role="img" aria-label="acceptance on {_name(cell[0])}">'
        f"{grid}{marks}{caption}{lines}</svg></div>"
    )


def _curve(row: Row, colour: str, x: Any, y: Any, positions: int) -> str:
    shares = row.acceptance_per_position[:positions]
    points = [(x(i), y(share)) for i, share in enumerate(shares)]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}">'
        f"<title>{escape(row.spec)}, token {i + 1}: {share:.0%}</title></circle>"
        for i, ((px, py), share) in enumerate(zip(points, shares, strict=True))
    )
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in cells(rows[0], rows))
    body = "".join(
        f"<tr{' class=first' if row.spec == PLAIN else ''}>"
        + "".join(f"<td>{escape(value)}</td>" for value in cells(row, rows).values())
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _place(meta: dict[str, Any]) -> str:
    machine = meta["machine"]
    processor = machine["accelerator"] or machine["processor"]
    return f"{processor}, {machine['threads']} threads · {meta['date'][:10]}"


def _flat(meta: dict[str, Any]) -> dict[str, str]:
    """One line per entry of `meta`; sampling parameters at their defaults are left out."""
    return {key.replace("_", " "): _text(value) for key, value in meta.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v not in (None, [], {}, ()))
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)


def _list(entries: dict[str, str]) -> str:
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items())
