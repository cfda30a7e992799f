"""`auto`: the drafters at hand for a model that go together well."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.drafters.spec import DrafterSpec
from forerun.interop import shipped

# Of networks the one that accepts most: with a second, finding out whom to ask costs more than it
# brings. Of those that ship, where their defaults would make a chain.
NETWORKS = ("eagle3", "dflash", "medusa")
TREE = {"top_k": 4, "nodes": 16}
OPTIONS: Mapping[str, Mapping[str, int]] = {"eagle3": TREE, "dflash": TREE}


def available(model: str) -> list[DrafterSpec]:
    """A corpus and a network, if they ship for a model of this name, and counts of the request.

    A corpus brings such counts itself, so that `suffix` is needed only where none ships.
    """
    places = {kind: place for kind in shipped.KINDS if (place := shipped.find(kind, model))}
    network = [kind for kind in NETWORKS if kind in places][:1]
    chosen = [kind for kind in ("corpus", *network) if kind in places]
    found = [DrafterSpec(kind, str(places[kind]), OPTIONS.get(kind, {})) for kind in chosen]
    if "corpus" not in places:
        found.insert(0, DrafterSpec("suffix"))
    return found
