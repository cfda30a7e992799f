"""`forerun train`: drafts for a model, made from its own answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import corpus, options
from forerun.cli.options import option
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.train.trainer import Step

KINDS = {
    "eagle3": "EAGLE-3: a layer that runs ahead on the model's hidden states; the best of them.",
    "medusa": "Medusa-1: heads that each guess one token further; the quickest to train.",
    "dflash": "DFlash: a small network that fills a whole block at once.",
    "medusa2": "Medusa-2: heads and the model itself, which is changed; held to a bound.",
}
LINES = 60  # that a run without a terminal prints

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
    dtype: str,
    device: str,
) -> None:
    from forerun.train.recipe import read_toml, seconds

    if budget is not None and tokens is not None:
        raise ConfigError("--budget and --tokens both say how long to train; give one of them")
    given: dict[str, Any] = {"tokens": tokens, "seed": seed}
    given["budget_seconds"] = None if budget is None else seconds(budget)
    file = read_toml(config) if config else {}

    from forerun.models import hub
    from forerun.train.objectives import OBJECTIVES
    from forerun.train.processes import place
    from forerun.train.recipe import make_recipe
    from forerun.train.trainer import train

    made = OBJECTIVES[kind]
    known = {name: value for name, value in given.items() if value is not None}
    recipe = make_recipe(kind, made.defaults, made.settings, file, known)
    loaded = hub.load(model, dtype, place(device))
    with _Bar() as bar:
        train(recipe, loaded, data, out, bar, ["forerun", *sys.argv[1:]])
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
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
    ) -> None:
        _train(kind, model, data, out, budget, tokens, config, seed, dtype, device)

    command.__doc__ = f"""{KINDS[kind]}

    \b
        forerun train {kind} --data answers.jsonl --out heads --budget 10m
    """
    return command


for _kind in KINDS:
    app.command(_kind)(_command(_kind))
app.command()(corpus.corpus)


class _Bar:
    """Progress on stderr: a bar where somebody may be watching, now and then a line elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._live = self._console.is_terminal
        self._bar = Progress(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=False,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=None)
        self._shown = 0.0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    def step(self, step: Step) -> None:
        if self._live:
            if time.monotonic() - self._shown > 0.2 or step.step == step.steps:
                self._shown = time.monotonic()
                self._bar.update(
                    self._task,
                    total=step.steps,
                    completed=step.step,
                    description=_line(step),
                    refresh=True,
                )
        elif step.step % max(1, step.steps // LINES) == 0 or step.step == step.steps:
            self.say(f"step {step.step}/{step.steps}  {_line(step)}")


def _line(step: Step) -> str:
    right = " ".join(f"{share:.2f}" for share in step.accuracy_P)
    left = round(step.seconds_left)
    return (
        f"loss {step.loss:.3f}  right {right}  {step.tokens_per_second:.0f} tok/s  "
        f"{left // 60}:{left % 60:02d} left"
    )
