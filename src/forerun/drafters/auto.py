"""`auto`: all drafters that are at hand for a model."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.drafters.spec import DrafterSpec
from forerun.interop import shipped

# Of drafts that ship, where their defaults would make a chain.
TREE = {"top_k": 4, "nodes": 16}
OPTIONS: Mapping[str, Mapping[str, int]] = {"eagle3": TREE, "dflash": TREE}


def available(model: str) -> list[DrafterSpec]:
    """Those that ship for a model of this name, and counts of the request.

    A corpus brings such counts itself, so that `suffix` is needed only where none ships.
    """
    found = [
        DrafterSpec(kind, str(place), OPTIONS.get(kind, {}))
        for kind in shipped.KINDS
        if (place := shipped.find(kind, model))
    ]
    if not any(part.name == "corpus" for part in found):
        found.insert(0, DrafterSpec("suffix"))
    return found
