"""`forerun train pilot`: a tenth of the budget on each kind, and which to train."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli import options
from forerun.cli.options import option
from forerun.cli.training import KINDS, Watch, given
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.train.pilot import Prospect
    from forerun.train.recipe import Recipe

PILOTED = [kind for kind in KINDS if kind != "medusa2"]  # drafts for the model as it is
PIPE_WIDTH = 140  # columns of the table where there is no terminal to fit it to


def pilot(
    data: Annotated[
        list[Path],
        option("What 'forerun data answers' wrote, or conversations; repeatable.", "--data"),
    ],
    out: Annotated[Path, option("The folder of all pilots; an unfinished one goes on.")],
    model: options.Model = options.DEFAULT_MODEL,
    budget: Annotated[
        str | None,
        option("Of a whole run; each kind gets a tenth. [default: 10m]", metavar="TIME"),
    ] = None,
    tokens: Annotated[int | None, option("Of a whole run, instead.")] = None,
    config: Annotated[
        list[Path], option("A recipe that names its kind; repeatable, one a kind.", metavar="TOML")
    ] = [],  # noqa: B006, typer wants it so
    seed: Annotated[int | None, option("Of everything that is random. [default: 0]")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Train a tenth of every kind, and say what each would reach and which to train.

    \b
        forerun train pilot --data answers.jsonl --out pilots --budget 1h
    """
    from forerun.train.recipe import read_toml

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a pilot is one process; start it without torchrun")
    values = given(budget, tokens, seed)
    files = _by_kind([(path, read_toml(path)) for path in config], PILOTED)

    from rich.console import Console

    from forerun.models import hub
    from forerun.train.objectives import OBJECTIVES
    from forerun.train.pilot import best, count, run
    from forerun.train.recipe import make_recipe

    recipes: dict[str, Recipe] = {}
    for kind in PILOTED:
        made = OBJECTIVES[kind]
        file = files.get(kind, {})
        recipes[kind] = make_recipe(kind, made.defaults, made.settings, file, values)
    loaded = hub.load(model, dtype, device)
    out.mkdir(parents=True, exist_ok=True)
    watch = Watch()
    started = ["forerun", *sys.argv[1:]]
    first = next(iter(recipes.values()))
    try:
        found = [count(first, loaded, data, out / "corpus", watch)]
        for kind, recipe in recipes.items():
            found.append(run(recipe, loaded, data, out / kind, watch, started))
    finally:
        watch.end()
    figures = json.dumps([asdict(prospect) for prospect in found], indent=2)
    (out / "pilot.json").write_text(figures + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(_table(found))
    print(_advice(found))
    command = ["forerun", "train", best(found).kind, "--model", model]
    command += [part for path in data for part in ("--data", str(path))]
    print(shlex.join([*command, *_rest(best(found), out, dtype, device)]))


def _by_kind(
    files: Sequence[tuple[Path, dict[str, Any]]], kinds: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for path, values in files:
        kind = str(values.get("kind"))
        if kind not in kinds:
            names = ", ".join(f'"{name}"' for name in kinds)
            raise ConfigError(
                f"{path} does not say whose recipe it is; write kind = one of {names}"
            )
        if kind in found:
            raise ConfigError(f"two recipes for {kind}; leave one out")
        found[kind] = values
    return found


def _table(prospects: Sequence[Prospect]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = (
        "draft",
        "steps",
        "learns",
        "size",
        "accepted",
        "at the end",
        "speed-up",
        "at the end",
    )
    for place, column in enumerate(columns):
        shown.add_column(column, justify="right" if place else "left")
    for p in prospects:
        done = p.step == p.steps
        shown.add_row(
            p.kind,
            "all" if done else f"{p.step} of {p.steps}",
            f"{p.tokens_per_second:.0f} tok/s" if p.tokens_per_second else "-",
            f"{p.megabytes:.0f} MB",
            f"{p.length:.2f}",
            "" if done else str(p.lengths),
            f"{p.speedup:.2f}x",
            "" if done else str(p.speedups),
        )
    return shown


def _advice(prospects: Sequence[Prospect]) -> str:
    from forerun.train.pilot import CORPUS, best, rivals

    chosen = best(prospects)
    if chosen.speedups.likely < 1:
        return (
            f"None is likely to be faster than plain decoding; {chosen.kind} comes closest. Give "
            "more answers, or a larger budget."
        )
    if chosen.kind == CORPUS:
        said = f"Take the corpus: none is likely to be faster than its {chosen.speedup:.2f}x here."
    else:
        said = (
            f"Train {chosen.kind}: it is likely to come to {chosen.lengths.likely:.2f} accepted "
            f"tokens a pass and {chosen.speedups.likely:.2f}x here."
        )
    if others := rivals(chosen, prospects):
        names = ", ".join(prospect.kind for prospect in others)
        said += f" A pilot of this size cannot rule out {names}."
    return said


def _rest(chosen: Prospect, out: Path, dtype: str, device: str) -> list[str]:
    """The end of the command that trains what was chosen: it goes on where the pilot stopped."""
    from forerun.train.pilot import CORPUS
    from forerun.train.state import RECIPE

    folder = out / chosen.kind
    if chosen.kind == CORPUS:
        return ["--out", str(folder)]
    rest = ["--out", str(folder), "--config", str(folder / RECIPE)]
    rest += [] if dtype == "auto" else ["--dtype", dtype]
    return rest + ([] if device == "auto" else ["--device", device])
