"""`forerun bench`: drafts against plain decoding on the user's prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.options import option
from forerun.cli.sweep import BUDGET, check_options, sweep
from forerun.errors import ConfigError
from forerun.tune.workloads import Workload, load_workload

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.tune.bench import Bench, Row

PIPE_WIDTH = 160  # columns of the table where there is no terminal to fit it to


def bench(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    draft: Annotated[
        list[str],
        option(
            "What to measure beside plain decoding, as in generate; repeatable.", metavar="SPEC"
        ),
    ] = [options.DEFAULT_DRAFT],  # noqa: B006, typer wants it so
    workload: Annotated[
        list[str],
        option(
            "chat, code, code-edit, summarise, math, qa-context, translate, mix, or a file: JSONL "
            "with prompt, messages or turns, or one prompt per line; repeatable.",
            metavar="NAME|FILE",
        ),
    ] = ["mix"],  # noqa: B006
    batch: Annotated[
        str, option("How many prompts to answer together, as 1,8.", metavar="SIZES")
    ] = "1",
    prompts: Annotated[int | None, option("Use only this many of each workload.")] = None,
    repeat: Annotated[int, option("Measure everything this many times.")] = 1,
    verifier: options.Verifier = "follow",
    static: options.Static = False,
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: Annotated[int, option("Of the first prompt; the others count on from it.")] = 0,
    ignore_eos: options.IgnoreEos = False,
    json_file: Annotated[
        Path | None, option("Write all figures there; - is stdout.", "--json", metavar="FILE")
    ] = None,
    html_file: Annotated[
        Path | None, option("Write a page with charts there.", "--html", metavar="FILE")
    ] = None,
    trace_file: Annotated[
        Path | None,
        option(
            "Run once more, unmeasured, and write there what the draft proposes at every place of "
            "the texts, for 'forerun simulate'.",
            "--trace",
            metavar="FILE",
        ),
    ] = None,
    sweep_file: Annotated[
        Path | None,
        option(
            "Instead: is any draft slower than plain decoding, on any workload, at any batch size "
            "or temperature? A sample of cells, measured in pairs, which go to this file; a run "
            "that was stopped goes on. Ends with 1 where a cell is below 0.97 of plain.",
            "--sweep",
            metavar="FILE",
        ),
    ] = None,
    budget: Annotated[
        str, option("How long a sweep may take, as 10m or 1h.", metavar="TIME")
    ] = BUDGET,
    kv_tokens: options.KvTokens = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> int:
    """Measure drafts beside plain decoding.

    \b
        forerun bench --draft ngram --draft suffix --workload code-edit
        forerun bench --draft model:org/small --workload mine.jsonl --batch 1,8 --html report.html
        forerun bench --sweep sweep.jsonl --budget 1h
    """
    check_options(context, sweep_file is not None)
    workloads = _load_workloads(workload, prompts)
    specs = [options.draft_spec(spec, None) for spec in draft]
    sizes = options.sizes("--batch", batch)
    params = options.sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
    )
    options.check_files(json_file, html_file, trace_file, sweep_file)

    from forerun.engine.cost_file import source
    from forerun.engine.llm import LLM
    from forerun.models import hub
    from forerun.tune.bench import Bench, Setting
    from forerun.tune.meta import describe
    from forerun.verify import make_verifier

    if sweep_file:
        return sweep(hub.load(model, dtype, device), sweep_file, seed, budget, kv_tokens)
    judge = make_verifier(verifier)
    if trace_file and (len(specs) > 1 or verifier != "follow"):
        raise ConfigError("--trace records one --draft, and under the verifier follow alone")
    setting = Setting(workloads, specs, sizes, params, repeat, raw, static)
    for spec in specs:
        options.check_draft(spec, model)
    _announce(workloads)  # what is wrong so far has been said before it
    loaded = hub.load(model, dtype, device)

    def start(spec: str, size: int, static: bool = static) -> LLM:
        return LLM(
            loaded,
            draft=spec,
            verifier=verifier,
            max_num_seqs=size,
            kv_tokens=kv_tokens,
            static=static,
        )

    bench = Bench(loaded, setting, start)
    meta = describe(loaded, setting, judge, ["forerun", *sys.argv[1:]])
    try:
        _run(bench)
    finally:  # also what was finished before Ctrl-C or an error
        meta["costs"] = source(loaded.target)
        if rows := bench.rows():
            _show(rows, meta, json_file, html_file)
    if trace_file:
        _record(bench, start(specs[0], sizes[0], True), trace_file)
    return 0


def _run(bench: Bench) -> None:
    """Measure, with a bar on stderr where somebody may be watching."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    # drawn between the runs only: a thread that redraws would take time from what is measured
    bar = Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("warming up", total=bench.runs)
        bar.refresh()
        for done in bench.run():
            bar.update(task, advance=1, description=done, refresh=True)


def _record(bench: Bench, llm: LLM, file: Path) -> None:
    """Answer all prompts again, and write what the draft proposes."""
    from forerun.simulate.record import record
    from forerun.simulate.traces import Source, write

    texts = []
    for prompts in bench.prompts.values():
        texts += record(llm, prompts, [bench.params(place) for place in range(len(prompts))])
    source = Source(
        model=bench.model.name,
        draft=bench.setting.specs[0],
        workloads=tuple(bench.prompts),
        temperature=bench.setting.params.temperature,
    )
    write(file, source, texts)


def _show(
    rows: Sequence[Row], meta: dict[str, Any], json_file: Path | None, html_file: Path | None
) -> None:
    from rich.console import Console

    from forerun.tune.page import page
    from forerun.tune.report import explanations, summary, table, to_json

    in_pipe = json_file == options.STDOUT
    console = Console(stderr=in_pipe)
    if not console.is_terminal:
        console = Console(stderr=in_pipe, width=PIPE_WIDTH)
    console.print(table(rows, console.width))
    for line in explanations(rows):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(summary(rows, meta), highlight=False, soft_wrap=True)
    if in_pipe:
        print(to_json(rows, meta), end="")
    elif json_file:
        json_file.write_text(to_json(rows, meta), encoding="utf-8")
    if html_file:
        html_file.write_text(page(rows, meta), encoding="utf-8")


def _load_workloads(names: Sequence[str], prompts: int | None) -> list[Workload]:
    if prompts is not None and prompts < 1:
        raise ConfigError(f"--prompts {prompts} leaves nothing to measure; give 1 or more")
    return [load_workload(name).first(prompts) for name in dict.fromkeys(names)]


def _announce(workloads: Sequence[Workload]) -> None:
    for workload in workloads:
        cut = sum(prompt.cut for prompt in workload.prompts)
        note = f"; of {cut} with several turns only the first is used" if cut else ""
        count = len(workload.prompts)
        print(f"{workload.name}: {count} prompts, hash {workload.hash}{note}", file=sys.stderr)
