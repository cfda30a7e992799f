"""Laws for compiled code (kernels/joined.c): beliefs as in `laws.py`, as they lie in memory."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from forerun.core import Draft
from forerun.models.heads.rounds import Ranked

NOBODY, COUNTS, TREE, PLACES = range(4)


class Source(ctypes.Structure):
    """A law; mirror of `Source` in kernels/joined.c. nodes, depth, floor: as `Law` has them.

    By itself it knows nothing.
    """

    nodes: int
    depth: int
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("nodes", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("floor", ctypes.c_double),
        ("net_at", ctypes.c_void_p),
        ("text_at", ctypes.c_void_p),
        ("tokens_at", ctypes.c_void_p),
        ("parents_at", ctypes.c_void_p),
        ("survival_at", ctypes.c_void_p),
        ("beliefs_at", ctypes.c_void_p),
    )

    def __init__(self, kind: int = NOBODY, **values: Any) -> None:
        """alive: what the addresses point to."""
        self.alive = values.pop("alive", None)
        super().__init__(kind, **values)

    @classmethod
    def of_draft(cls, draft: Draft) -> Source:
        """As `laws.of_draft`."""
        count = len(draft)
        if not count:
            return cls()
        arrays = array("q", draft.tokens), array("i", draft.parents), array("d", draft.survival)
        tokens_at, parents_at, survival_at = (each.buffer_info()[0] for each in arrays)
        return cls(
            TREE,
            nodes=count,
            depth=count,
            count=count,
            tokens_at=tokens_at,
            parents_at=parents_at,
            survival_at=survival_at,
            alive=arrays,
        )

    @classmethod
    def of_places(cls, ranked: Ranked, nodes: int) -> Source:
        """As `laws.of_places`."""
        return cls(
            PLACES,
            nodes=nodes,
            depth=ranked.places,
            count=ranked.places,
            width=ranked.width,
            tokens_at=ranked.tokens_at,
            beliefs_at=ranked.beliefs_at,
            alive=ranked,
        )
