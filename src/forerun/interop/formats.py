"""Draft checkpoints of every family: what a folder holds, and how it goes to other engines."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun.errors import CheckpointError, ConfigError
from forerun.interop import dflash, dflash_trial, eagle, eagle_trial, lent, medusa, medusa_trial
from forerun.interop.trial import Trial, speak
from forerun.models.heads.dflash import DFlash
from forerun.models.heads.eagle import Eagle3
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.hub import LoadedModel
from forerun.models.target import TargetInfo, opened

# Each has detect, read, describe and export, with the same meaning.
# EAGLE comes last: it is told by its tensors, and of those some may be missing.
FAMILIES: dict[str, ModuleType] = {"medusa": medusa, "dflash": dflash, "eagle": eagle}
TRIALS: dict[str, ModuleType] = {
    "medusa": medusa_trial,
    "eagle": eagle_trial,
    "dflash": dflash_trial,
}


def family(folder: Path) -> str | None:
    """Which family of drafts a folder holds; None: none of them.

    A Medusa-2 folder is `medusa` and a model of its own, too.
    """
    return next((name for name, files in FAMILIES.items() if files.detect(folder)), None)


def is_model(folder: Path) -> bool:
    """Whether a folder with a draft is a model of its own, too."""
    return family(folder) == "medusa" and medusa.lies_beside_its_model(folder)


def describe(folder: Path, target: TargetInfo | None = None) -> list[str]:
    """What a draft is, in plain sentences. `! ` stands before what looks wrong, `? ` before what
    its files leave open and `attempt` answers.

    target: the model it is meant for. Raises `CheckpointError` where it cannot be read.
    """
    sentences: list[str] = _files(folder).describe(folder, target)
    return sentences


def attempt(folder: Path, info: TargetInfo, load: Callable[[], LoadedModel]) -> Trial | None:
    """Try a draft on text of the model that it is meant for; None where it does not fit.

    info: what is known of that model before it is loaded. Raises `ConfigError` where the model lets
    no draft look inside or says next to nothing, and what `load` raises.
    """
    name = family(folder)
    assert name
    draft = FAMILIES[name].read(folder, None, info.name)
    if _misfits(draft, folder, info):
        return None
    model = load()
    target = opened(model.target, name)
    draft = draft.to(device=target.info.device, dtype=target.info.dtype)
    found: Trial = TRIALS[name].trial(draft, target, speak(model))
    return found


def _misfits(draft: Any, folder: Path, info: TargetInfo) -> list[str]:
    if isinstance(draft, MedusaHeads):
        return medusa.misfits(draft.config, folder, info)
    if isinstance(draft, DFlash):
        return dflash.misfits(draft.config, info)
    return eagle.misfits(draft.settings, info)


def export(layout: str, folder: Path, out: Path, target: str | None = None) -> str:
    """Write a draft in another layout; gives the command line to paste.

    layout: one of its family, or `forerun`, without the rows that its target has anyway.
    target: the model it belongs to, for the command line and for what the layout takes from it.
    Raises `ConfigError` where the layout does not exist or cannot express the draft.
    """
    files = _files(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; name a new folder")
    module = files.read(folder, None, target)  # each tensor in the type it is stored in
    try:
        if layout == lent.LAYOUT:
            return _without_target(module, folder, out, target)
        line: str = files.export(module, layout, out, **({"target": target} if target else {}))
    except OSError as error:
        reason = "no space is left" if error.errno == errno.ENOSPC else error.strerror
        raise ConfigError(f"{out} cannot be written ({reason}); name another folder") from None
    return line


def _without_target(module: Any, folder: Path, out: Path, target: str | None) -> str:
    if target is None:
        raise ConfigError(
            "forerun's own layout leaves out what the target has anyway; name it with --target"
        )
    lent.leave_out(folder, out, target)
    name = "eagle3" if isinstance(module, Eagle3) else family(folder)
    return f'forerun generate "PROMPT" --model {target} --draft {name}:{out}'


def _files(folder: Path) -> ModuleType:
    name = family(folder)
    if name is None:
        if (folder / "config.json").exists():
            lent.draft_weights(folder, None)  # says what is wrong with files that cannot be read
        raise CheckpointError(
            f"{folder} holds no draft of a known family ({', '.join(FAMILIES)}); "
            "give the folder with its config.json and weights"
        )
    return FAMILIES[name]
