"""`forerun train corpus`: a file of what follows what in answers of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.options import option
from forerun.errors import ConfigError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def corpus(
    data: Annotated[
        list[Path], option("A file that 'forerun data answers' wrote; repeatable.", metavar="FILE")
    ],
    out: Annotated[Path, option("The file to write; it is then run as corpus:FILE.", "--out")],
    model: options.Model = options.DEFAULT_MODEL,
    size: Annotated[str, option("Largest size of the file, as 500KB or 8MB.")] = "8MB",
    order: Annotated[int, option("Tokens of the longest contexts.")] = 4,
) -> None:
    """Count what follows what in answers of the model: a draft without a network, in seconds.

    \b
        forerun train corpus --data answers.jsonl --out smollm2.corpus
        forerun generate "Why is the sky blue?" --draft corpus:smollm2.corpus
    """
    limit = _bytes(size)
    if not 1 <= order <= 16:
        raise ConfigError(f"--order is {order}; give 1 to 16")
    from forerun.models.hub import load
    from forerun.train.corpus import train
    from forerun.train.examples import load as load_examples

    loaded = load(model)
    examples = load_examples(data, loaded.tokenizer, loaded.target.info.max_length)
    header = train(examples, loaded, out, limit, order)
    written = out.stat().st_size
    typer.echo(f"{out}: {header.counted} tokens counted, {written / 1e6:.1f} MB", err=True)


def _bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", size.strip().upper())
    if not found:
        raise ConfigError(f"--size {size} is no size; write for example 8MB")
    return int(float(found[1]) * UNITS[found[2]])
