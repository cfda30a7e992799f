"""`forerun export`: drafts for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import option

Folder = Annotated[Path, typer.Argument(help="The folder of the draft.", metavar="DIR")]


def export(
    layout: Annotated[
        str,
        typer.Argument(
            help="Who will read it: vllm, sglang, speculators, specforge, or a family's own layout."
        ),
    ],
    draft: Folder,
    out: Annotated[Path, typer.Argument(help="A new folder to write to.")],
    target: Annotated[
        str | None, option("The model that the draft belongs to.", metavar="MODEL")
    ] = None,
) -> None:
    """Write a draft for another engine, with its command line.

    \b
        forerun export vllm ./heads ./heads-vllm --target HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from forerun.interop import formats

    print(formats.export(layout, draft, out, target))
