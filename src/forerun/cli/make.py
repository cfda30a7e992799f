"""`forerun export`: drafts for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import option

Folder = Annotated[
    str,
    typer.Argument(help="The folder of the draft, or KIND:MODEL of one that ships.", metavar="DIR"),
]


def export(
    layout: Annotated[
        str,
        typer.Argument(
            help="Who will read it: vllm, sglang, speculators, specforge, a family's own layout, "
            "or forerun, which leaves out the rows that the target has anyway."
        ),
    ],
    draft: Folder,
    out: Annotated[Path, typer.Argument(help="A new folder to write to.")],
    target: Annotated[
        str | None, option("The model that the draft belongs to.", metavar="MODEL")
    ] = None,
) -> None:
    """Write a draft for another engine, with its command line.

    The layout 'forerun' is for publishing: it is small, and forerun alone reads it.

    \b
        forerun export vllm ./heads ./heads-vllm --target HuggingFaceTB/SmolLM2-135M-Instruct
        forerun export forerun ./heads ./heads-small --target smollm2-135m
    """
    from forerun.interop import formats, shipped

    print(formats.export(layout, shipped.place(draft), out, target))
