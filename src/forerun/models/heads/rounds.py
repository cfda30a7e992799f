"""What compiled rounds of drafting share (kernels/rounds.h): rules in, trees out."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from forerun.core import Draft
from forerun.errors import CapacityError
from forerun.models.compiled import Compiled, PackedMatrix
from forerun.models.target import OpenTarget

Drafted = tuple[Draft, Sequence[float]]  # with honest survival; the belief in each node


class Wanted(NamedTuple):
    """The tree of a request. ends: tokens that nothing follows. ratio: by which beliefs about this
    request are multiplied."""

    nodes: int
    ends: frozenset[int]
    ratio: float


class Rules(ctypes.Structure):
    """How beliefs become chances, as in `Calibration`; mirror of `Rules` in kernels/rounds.h."""

    _fields_ = (
        ("width", ctypes.c_int32),
        ("bins", ctypes.c_int32),
        ("most", ctypes.c_double),
        ("ratios", ctypes.c_void_p),
    )

    def __init__(self, width: int, ratios: array[float], most: float) -> None:
        """width: candidates of a place. ratios: per bin of beliefs and one more, by which they are
        multiplied; read anew in every round. most: the largest chance."""
        super().__init__(width, len(ratios) - 1, most, ratios.buffer_info()[0])
        self._ratios = ratios  # keeps alive what the address points to


class Tree(ctypes.Structure):
    """Mirror of `Tree` in kernels/rounds.h."""

    _fields_ = (
        ("nodes", ctypes.c_int32),
        ("end_count", ctypes.c_int32),
        ("ends", ctypes.c_void_p),
        ("ratio", ctypes.c_double),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
    )


class Room(ctypes.Structure):
    """Mirror of `Room` in kernels/rounds.h."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("beliefs", ctypes.c_void_p),
        ("survival", ctypes.c_void_p),
    )


class Rounds:
    """Trees for all requests of a batch in one call. seconds: what the passes of the last round
    took, from what they are fed to the logits."""

    def __init__(self, backend: Compiled) -> None:
        self._lib = backend.lib
        self._nodes = _Nodes(0)
        self.seconds = 0.0

    def _run(
        self,
        round: Callable[..., float],
        network: ctypes.Structure,
        wanted: Sequence[Wanted],
        rules: Rules,
        *starts: Any,
    ) -> list[Drafted]:
        """What a compiled function drafts. starts: what it takes behind the rules."""
        ends = [_laid_out(each.ends) for each in wanted]
        trees = self._trees(wanted, ends)
        self.seconds = round(
            ctypes.addressof(network),
            ctypes.addressof(rules),
            *starts,
            trees,
            self._nodes.room_at,
            len(trees),
        )
        if self.seconds < 0:
            raise CapacityError("no memory for a round of drafting; ask for fewer requests at once")
        return [self._nodes.drafted(tree.first, tree.first + tree.count) for tree in trees]

    def _trees(self, wanted: Sequence[Wanted], ends: Sequence[array[int]]) -> ctypes.Array[Tree]:
        """The trees as compiled code is asked for them, with room for their nodes."""
        trees: list[Any] = []  # tuples, which ctypes makes structures of
        nodes = 0
        for each, tokens in zip(wanted, ends, strict=True):
            trees.append((each.nodes, len(tokens), tokens.buffer_info()[0], each.ratio, nodes))
            nodes += each.nodes
        if nodes > self._nodes.count:
            self._nodes = _Nodes(nodes)
        return (Tree * len(trees))(*trees)


class _Nodes:
    """Room for all nodes of a round, kept: fresh arrays would cost more than that."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tokens = array("q", bytes(8 * count))
        self._parents = array("i", bytes(4 * count))
        self._beliefs = array("d", bytes(8 * count))
        self._survival = array("d", bytes(8 * count))
        arrays = (self._tokens, self._parents, self._beliefs, self._survival)
        self._room = Room(*(each.buffer_info()[0] for each in arrays))
        self.room_at = ctypes.addressof(self._room)

    def drafted(self, begin: int, end: int) -> Drafted:
        """The tree whose nodes lie there."""
        draft = Draft(
            self._tokens[begin:end].tolist(),
            self._parents[begin:end].tolist(),
            self._survival[begin:end].tolist(),
        )
        return draft, self._beliefs[begin:end]


@lru_cache(maxsize=64)
def _laid_out(tokens: frozenset[int]) -> array[int]:
    return array("q", tokens)


def lent_head(target: OpenTarget) -> PackedMatrix | None:
    """The target's output matrix, where compiled rounds can use it: its logits are not capped."""
    backend = target.backend
    if not isinstance(backend, Compiled) or backend.config.logit_softcap is not None:
        return None
    head: PackedMatrix = target.head
    return head
