"""Where forerun keeps what it has fetched or built."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """FORERUN_HOME, else `forerun` in XDG_CACHE_HOME, else ~/.cache/forerun. May not exist yet."""
    if home := os.environ.get("FORERUN_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"
