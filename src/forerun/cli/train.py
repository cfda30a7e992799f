"""`forerun train`: drafts for a model, made from its own answers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import corpus, options, pilot
from forerun.cli.options import option
from forerun.cli.training import KINDS, Watch, given

app = typer.Typer(help="Train a draft on a model's own answers.", no_args_is_help=True)


def _train(
    kind: str,
    model: str,
    data: list[Path],
    out: Path,
    budget: str | None,
    tokens: int | None,
    config: Path | None,
    seed: int | None,
    start: str | None,
    dtype: str,
    device: str,
) -> None:
    from forerun.train.recipe import read_toml

    values = given(budget, tokens, seed)
    if start is not None:
        values["start"] = start
    file = read_toml(config) if config else {}

    from forerun.models import hub
    from forerun.train.objectives import OBJECTIVES
    from forerun.train.processes import place
    from forerun.train.recipe import make_recipe
    from forerun.train.trainer import prepare

    made = OBJECTIVES[kind]
    recipe = make_recipe(kind, made.defaults, made.settings, file, values)
    loaded = hub.load(model, dtype, place(device))
    watch = Watch()
    try:
        run = prepare(recipe, loaded, data, out, watch, ["forerun", *sys.argv[1:]])
        progress = run.run()
    finally:
        watch.end()
    if progress.spec:
        served = str(out) if made.changes_model else model
        command = ["forerun", "generate", "Why is the sky blue?", "--model", served]
        watch.say(f"fastest here: {shlex.join([*command, '--draft', progress.spec])}")
    print(out)


def _command(kind: str) -> Callable[..., None]:
    def command(
        data: Annotated[
            list[Path],
            option("What 'forerun data answers' wrote, or conversations; repeatable.", "--data"),
        ],
        out: Annotated[Path, option("The folder of the draft; an unfinished run goes on.")],
        model: options.Model = options.DEFAULT_MODEL,
        budget: Annotated[
            str | None, option("Wall time, as 10m or 1h. [default: 10m]", metavar="TIME")
        ] = None,
        tokens: Annotated[int | None, option("Train on this many tokens instead.")] = None,
        config: Annotated[
            Path | None, option("A recipe; DIR/training/recipe.toml is one.", metavar="TOML")
        ] = None,
        seed: Annotated[int | None, option("Of everything that is random. [default: 0]")] = None,
        start: Annotated[
            str | None,
            option("An earlier draft to begin with, as in --draft.", metavar="DIR"),
        ] = None,
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
    ) -> None:
        _train(kind, model, data, out, budget, tokens, config, seed, start, dtype, device)

    command.__doc__ = f"""{KINDS[kind]}

    \b
        forerun train {kind} --data answers.jsonl --out heads --budget 10m
    """
    return command


for _kind in KINDS:
    app.command(_kind)(_command(_kind))
app.command()(corpus.corpus)
app.command()(pilot.pilot)
