"""Where forerun keeps what it has fetched or built, and how it writes files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """FORERUN_HOME, else `forerun` in XDG_CACHE_HOME, else ~/.cache/forerun. May not exist yet."""
    if home := os.environ.get("FORERUN_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Somewhere to write what is to become `path`, which is replaced at once when all is written.
    Makes the folder, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as scratch:
        fresh = Path(scratch) / path.name
        yield fresh
        fresh.replace(path)
