"""What compiled rounds of drafting share (kernels/rounds.h): rules and trees."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from forerun.core import Draft, Request
from forerun.errors import CapacityError
from forerun.models import kernels
from forerun.models.compiled import Compiled, PackedMatrix
from forerun.models.heads.ratios import Ratios
from forerun.models.target import OpenTarget


class Rules(ctypes.Structure):
    """How beliefs become chances, as in `Calibration`; mirror of `Rules` in kernels/rounds.h."""

    _fields_ = (
        ("width", ctypes.c_int32),
        ("bins", ctypes.c_int32),
        ("contenders", ctypes.c_int32),
        ("most", ctypes.c_double),
        ("shared_at", ctypes.c_void_p),
    )

    def __init__(
        self, width: int, nodes: int, contenders: int, shared: Ratios, most: float
    ) -> None:
        """width: candidates of a place. nodes: most in a tree. contenders: likeliest tokens of a
        place that race where a request samples. shared: per bin of beliefs and one more, by which
        they are multiplied; read anew in every round. most: the largest chance."""
        bins = len(shared.values) - 1
        super().__init__(width, bins, contenders, most, ctypes.addressof(shared))
        self.nodes = nodes
        self.address = ctypes.addressof(self)
        self._shared = shared  # keeps alive what the address points to


class Sampling(ctypes.Structure):
    """How a request chooses its tokens; mirror of `Sampling` in kernels/rounds.h."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, request: Request) -> Sampling:
        params = request.params
        return cls(params.temperature, params.min_p, params.top_p, params.top_k, request.seed)


class Tree(ctypes.Structure):
    """The tree of a request, grown anew in every round; mirror of `Tree` in kernels/rounds.h.

    It stays where it is, with room for all nodes that it may ever have: behind a pass of the target
    every object that is made costs as much as a dozen nodes. `nodes` is how many it may have next,
    `position` that of the tokens behind its root.
    """

    nodes: int
    position: int
    count: int
    _fields_ = (
        ("nodes", ctypes.c_int32),
        ("end_count", ctypes.c_int32),
        ("ends_at", ctypes.c_void_p),
        ("own_at", ctypes.c_void_p),
        ("sampling", Sampling),
        ("position", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("tokens_at", ctypes.c_void_p),
        ("parents_at", ctypes.c_void_p),
        ("beliefs_at", ctypes.c_void_p),
        ("survival_at", ctypes.c_void_p),
        ("behind_at", ctypes.c_void_p),
    )

    def __init__(self, rules: Rules, request: Request, own: Ratios) -> None:
        """own: the ratio of this request, by which beliefs are multiplied, too."""
        room = rules.nodes
        self._tokens = (ctypes.c_int64 * room)()
        self._parents = (ctypes.c_int32 * room)()
        self._beliefs = (ctypes.c_double * room)()
        self._survival = (ctypes.c_double * room)()
        behind = (ctypes.c_int32 * room)()
        laid_out = _laid_out(request.stop_ids)
        arrays: Sequence[ctypes.Array[Any]] = (
            self._tokens,
            self._parents,
            self._beliefs,
            self._survival,
            behind,
        )
        super().__init__(
            room,
            len(laid_out),
            laid_out.buffer_info()[0],
            ctypes.addressof(own),
            Sampling.of(request),
            0,
            0,
            *(ctypes.addressof(each) for each in arrays),
        )
        self.ends = request.stop_ids
        self.address = ctypes.addressof(self)
        self._rules_at = rules.address
        self._alive = (rules, laid_out, own, behind)  # what the addresses point to

    def draft(self) -> Draft:
        """What was grown, with honest survival."""
        count = self.count
        return Draft(self._tokens[:count], self._parents[:count], self._survival[:count])

    def settle(self, truth: Sequence[int]) -> None:
        """Learn from the tokens that followed, in its own ratio and in those of the rules."""
        lib = kernels.library()
        assert lib, "compiled code has grown it"
        tokens = array("q", truth)
        lib.settle(self._rules_at, self.address, tokens.buffer_info()[0], len(tokens))


class Ranked(ctypes.Structure):
    """The candidates of each place, best first; mirror of `Ranked` in kernels/rounds.h."""

    tokens_at: int
    beliefs_at: int
    _fields_ = (("tokens_at", ctypes.c_void_p), ("beliefs_at", ctypes.c_void_p))

    def __init__(self, places: int, width: int) -> None:
        self.places, self.width = places, width
        self._tokens = (ctypes.c_int64 * (places * width))()
        self._beliefs = (ctypes.c_float * (places * width))()
        super().__init__(ctypes.addressof(self._tokens), ctypes.addressof(self._beliefs))

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], beliefs: Sequence[Sequence[float]]) -> Ranked:
        """What is known already, by place."""
        ranked = cls(len(tokens), len(tokens[0]))
        for place, (ids, chances) in enumerate(zip(tokens, beliefs, strict=True)):
            for rank, (token, chance) in enumerate(zip(ids, chances, strict=True)):
                ranked._tokens[place * ranked.width + rank] = token
                ranked._beliefs[place * ranked.width + rank] = chance
        return ranked


def in_a_row(ranked: Sequence[Ranked]) -> ctypes.Array[Ranked] | None:
    """As compiled rounds take them; None, where trees are wanted."""
    return (Ranked * len(ranked))(*ranked) if ranked else None


class Rounds:
    """Trees for all requests of a batch in one call. seconds: what the passes of the last round
    took, from what they are fed to the logits."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self.seconds = 0.0

    def _run(
        self,
        round: Callable[..., float],
        network: ctypes.Structure | ctypes.Array[Any],
        rules: Rules,
        trees: Sequence[Tree],
        *starts: Any,
    ) -> None:
        """Let a compiled function grow trees. starts: what it takes behind the rules."""
        addresses = array("Q", [tree.address for tree in trees])
        self.seconds = round(
            ctypes.addressof(network),
            rules.address,
            *starts,
            addresses.buffer_info()[0],
            len(addresses),
        )
        if self.seconds < 0:
            raise CapacityError("no memory for a round of drafting; ask for fewer requests at once")


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
