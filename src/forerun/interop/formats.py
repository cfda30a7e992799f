"""Draft checkpoints of every family: what a folder holds, and how it goes to other engines."""

from __future__ import annotations

import errno
from pathlib import Path
from types import ModuleType

from forerun.errors import CheckpointError, ConfigError
from forerun.interop import dflash, eagle, medusa
from forerun.models.target import TargetInfo

# Each has detect, read, describe and export, with the same meaning.
FAMILIES: dict[str, ModuleType] = {"medusa": medusa, "eagle": eagle, "dflash": dflash}


def family(folder: Path) -> str | None:
    """Which family of drafts a folder holds; None: none of them.

    A Medusa-2 folder is `medusa` and a model of its own, too.
    """
    return next((name for name, files in FAMILIES.items() if files.detect(folder)), None)


def is_model(folder: Path) -> bool:
    """Whether a folder with a draft is a model of its own, too."""
    return family(folder) == "medusa" and medusa.lies_beside_its_model(folder)


def describe(folder: Path, target: TargetInfo | None = None) -> list[str]:
    """What a draft is, in plain sentences; what looks wrong starts with `! `.

    target: the model it is meant for. Raises `CheckpointError` where it cannot be read.
    """
    sentences: list[str] = _files(folder).describe(folder, target)
    return sentences


def export(layout: str, folder: Path, out: Path, target: str | None = None) -> str:
    """Write a draft in another layout; gives the command line to paste.

    target: the model it belongs to, for the command line and for what the layout takes from it.
    Raises `ConfigError` where the layout does not exist or cannot express the draft.
    """
    files = _files(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; name a new folder")
    module = files.read(folder, None)  # each tensor in the type it is stored in
    try:
        line: str = files.export(module, layout, out, **({"target": target} if target else {}))
    except OSError as error:
        reason = "no space is left" if error.errno == errno.ENOSPC else error.strerror
        raise ConfigError(f"{out} cannot be written ({reason}); name another folder") from None
    return line


def _files(folder: Path) -> ModuleType:
    name = family(folder)
    if name is None:
        raise CheckpointError(
            f"{folder} holds no draft of a known family ({', '.join(FAMILIES)}); "
            "give the folder with its config.json and weights"
        )
    return FAMILIES[name]
