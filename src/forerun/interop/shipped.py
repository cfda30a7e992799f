"""Drafts that come with forerun, for models of `forerun models list`: `KIND:MODEL` in a draft spec.

    drafts/MODEL/corpus       a file of `forerun train corpus`
    drafts/MODEL/eagle3/      and dflash/, medusa/: folders of `forerun export forerun`

A file or folder that is added there ships under that name; nothing else says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forerun.errors import ConfigError

KINDS = ("corpus", "medusa", "eagle3", "dflash")
FOLDER = Path(__file__).parents[1] / "drafts"

# The draft spec that writes fastest, by model. `make demo` runs it; without an entry, `suffix`.
BEST: dict[str, str] = {"smollm2-135m": "corpus:smollm2-135m"}


def every() -> Iterator[tuple[str, str, Path]]:
    """What ships: kind of draft, name of the model, where it lies."""
    for place in sorted(FOLDER.glob("*/*")):
        if place.name in KINDS:
            yield place.name, place.parent.name, place


def find(kind: str, model: str) -> Path | None:
    """Where the draft of a kind for a model lies; None where none ships."""
    return next((place for k, m, place in every() if (k, m) == (kind, model)), None)


def locate(kind: str, name: str) -> Path:
    """Where a draft lies: a path that exists, else one that ships under this name, else a Hub id.

    Raises `ConfigError` that lists what ships where it is none of them, `ModelError` for a Hub id
    that cannot be had.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if place := find(kind, name):
        return place
    if "/" in name and kind != "corpus":
        from forerun.models import hub  # imports torch, which listing does without

        return hub.locate(name)
    make = f" (forerun train {kind} makes one)" if kind in KINDS else ""
    names = ", ".join(f"{k}:{m}" for k, m, _ in every())
    ships = f", or one that ships: {names}" if names else ""
    raise ConfigError(f"there is no {kind} draft '{name}'; give the path of one{make}{ships}")


def place(draft: str) -> Path:
    """A path as it is given, or where `KIND:NAME` of a draft spec lies. Raises as `locate`."""
    path = Path(draft).expanduser()
    kind, colon, name = draft.partition(":")
    if path.exists() or not colon or kind not in KINDS:
        return path
    return locate(kind, name)
