"""The command `forerun`: what exists, and how it ends when something goes wrong.

Exit codes: 0 done, 1 an expected failure, 2 a wrong command line, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from forerun.cli import data, make, measure, models, run, simulate, train
from forerun.config import nearest
from forerun.errors import ForerunError
from forerun.tune.metrics import DEFINITIONS

INTERRUPTED = 130
# typer keeps the base of its own usage errors to itself
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _columns() -> str:
    """The columns of `bench`, as an epilog of its help."""
    lines = [f"  {name:19} {meaning}" for name, meaning in DEFINITIONS.items()]
    return "\n".join(["\b", "The figures:", *lines])


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.generate)
app.command(epilog=_columns())(measure.bench)
app.command()(simulate.simulate)
app.command()(models.inspect)
app.command()(make.export)
app.add_typer(data.app, name="data")
app.add_typer(train.app, name="train")
app.add_typer(models.app, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forerun {version('forerun')}")
        raise typer.Exit


@app.callback()
def forerun(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say which one."),
    ] = False,
) -> None:
    """Speculative decoding that does not change what a model writes.

    \b
        forerun generate "Why is the sky blue?" --show-drafts
        forerun bench --draft ngram --draft suffix --workload code-edit
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Expected failures end in one line on stderr."""
    try:
        code = app(arguments, prog_name="forerun", standalone_mode=False)
        sys.stdout.flush()  # so that a full disk is seen here
    except ForerunError as error:
        return _fail(str(error), 1)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            typer.echo(str(error), err=True)
            return 2
        return _fail(_explain(error), 2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        # what is still buffered goes nowhere, or Python complains once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 1
        return _fail("cannot write the output: the disk is full; make room", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    typer.echo(f"error: {message}", err=True)
    return code


def _explain(error: Any) -> str:
    """What is wrong with a command line, with the nearest option or command that exists."""
    message = str(error.format_message()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = error.ctx
    if context is None:
        return message
    if hasattr(error, "possibilities"):  # an option that does not exist
        known = {name for p in context.command.params for name in p.opts if name.startswith("--")}
        message = f"no such option: {error.option_name}; {nearest(error.option_name, known)}"
    return f"{message} ('{context.command_path} --help' explains)"
