"""Where and how figures came about, so that they can be traced."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun.models.hub import LoadedModel
from forerun.models.target import TargetInfo
from forerun.tune.bench import Setting
from forerun.verify import Verifier
from forerun.versions import versions

PACKAGES = ("forerun", "torch", "transformers", "tokenizers", "numpy")


def describe(
    model: LoadedModel, setting: Setting, verifier: Verifier, command: Sequence[str]
) -> dict[str, Any]:
    """The `meta` object of a benchmark."""
    info = model.target.info
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "git_revision": git_revision(Path(forerun.__file__).parent),
        "versions": software(),
        "machine": machine(),
        "model": model.name,
        "architecture": info.architecture,
        "row_invariant": info.row_invariant,
        "tree_invariant": info.tree_invariant,
        "verifier": verifier.name,
        "promise": promise(verifier, model.target.info, setting.params.greedy),
        "sampling": setting.params.model_dump(),
        "seed": setting.params.seed,
        "repeat": setting.repeat,
        "raw": setting.raw,
        "static": setting.static,
        "workloads": {
            workload.name: {"hash": workload.hash, "prompts": len(workload.prompts)}
            for workload in setting.workloads
        },
    }


def promise(verifier: Verifier, info: TargetInfo, greedy: bool) -> str:
    """What a verifier keeps of plain decoding on this model and machine."""
    if not verifier.lossless:
        return f"{verifier.name} is lossy: it may write what the model would not"
    if verifier.independent_noise and not greedy:
        return f"{verifier.name} keeps the distribution, not the text that belongs to a seed"
    if info.row_invariant and info.tree_invariant:
        return f"{verifier.name} keeps the text, bit for bit on this machine"
    return f"{verifier.name} keeps the text, up to ties of the arithmetic on this machine"


def software() -> dict[str, str]:
    """Versions of Python and of the packages that the figures depend on."""
    return {"python": platform.python_version(), **versions(*PACKAGES)}


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory and accelerator."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git_revision(folder: Path) -> str | None:
    """The commit of the source in `folder`, `+` behind it if files have changed since.

    None where the folder is not under version control itself, such as an installed package that
    lies inside some other project.
    """
    try:
        if not _git(folder, "ls-files", "--", "__init__.py"):
            return None
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
        return _git(folder, "rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
