"""Greedy rounds of an EAGLE-3 draft, each in one compiled call (kernels/drafting.c).

R rows that are due, F features per row, C hidden size, V vocabulary of the target, U of the draft.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.core import Draft
from forerun.errors import CapacityError
from forerun.models import kernels
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.layers import Layer


@dataclass(frozen=True, slots=True)
class Rules:
    """How trees grow. See `Growth` for width and floor and `Calibration` for the others.

    ratios: per bin of beliefs and one more, by which they are multiplied. most: the largest chance.
    """

    width: int
    floor: float
    ratios: Sequence[float]
    most: float


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request stands before a round, and how far its tree may grow.

    features_RF, tokens: what its next rows are fed; None: no row is due. hidden_1C: what its last
    row handed on, written over if rows are due. ends: tokens that nothing follows. ratio: by which
    beliefs about this request are multiplied.
    """

    span: Span
    features_RF: Tensor | None
    tokens: Sequence[int]
    hidden_1C: Tensor
    nodes: int
    depth: int
    ends: Collection[int]
    ratio: float


@dataclass(frozen=True, slots=True)
class Network:
    """What rows are computed with. feature_norms: of equal parts of the features."""

    layers: Sequence[Layer]
    embedding_VC: Tensor
    fc: PackedMatrix
    head: PackedMatrix
    feature_norms: Sequence[Tensor]
    last_norm_C: Tensor | None
    norm_output: bool
    ids_U: Tensor | None


class EagleRounds:
    """Rows that are due and trees over them, for all requests of a batch.

    seconds: what the passes of the last round took.
    """

    def __init__(self, backend: Compiled, store: KVStore, network: Network) -> None:
        self._backend, self._store = backend, store
        self._network = n = network  # keeps alive what the addresses point to
        norms = [norm_C.data_ptr() for norm_C in n.feature_norms]
        self._norms = (ctypes.c_void_p * len(norms))(*norms)
        self._address = kernels.Network(
            backend.bf16,
            backend.config.hidden_size,
            n.fc.address.in_,
            len(n.layers),
            len(norms),
            None,  # layers move with the positions that are in use
            ctypes.addressof(self._norms),
            n.embedding_VC.data_ptr(),
            n.fc.address,
            n.head.address,
            address(n.last_norm_C),
            backend.config.norm_eps,
            n.norm_output,
            n.head.outputs,
            address(n.ids_U),
        )
        self.seconds = 0.0

    def draft(self, starts: Sequence[Start], rules: Rules) -> list[Draft]:
        """The trees that `Growth` would grow, whose survival is the belief in each node given its
        parent. Rows that were due are written behind those of their span, but not committed."""
        positions = max(start.span.length + len(start.tokens) + start.depth for start in starts)
        layers = self._backend.addresses_in(self._store, positions, self._network.layers)
        self._address.layers = ctypes.addressof(layers)
        ratios = array("d", rules.ratios)
        parts = [_Lane(start) for start in starts]
        lanes = (kernels.Lane * len(parts))(*[part.address for part in parts])
        self.seconds = self._backend.lib.draft_round(
            ctypes.byref(self._address),
            ctypes.byref(
                kernels.Rules(
                    rules.width, len(ratios) - 1, rules.floor, rules.most, ratios.buffer_info()[0]
                )
            ),
            lanes,
            len(lanes),
        )
        if self.seconds < 0:
            raise CapacityError("no memory for a round of drafting; ask for fewer requests at once")
        return [part.draft(lane.count) for part, lane in zip(parts, lanes, strict=True)]


class _Lane:
    """A request as compiled code sees it, and the arrays it points into."""

    def __init__(self, start: Start) -> None:
        self._due = array("q", start.tokens)
        self._ends = array("q", start.ends)
        self._features_RF = None if start.features_RF is None else start.features_RF.contiguous()
        self._tokens = (ctypes.c_int64 * start.nodes)()
        self._parents = (ctypes.c_int32 * start.nodes)()
        self._beliefs = (ctypes.c_double * start.nodes)()
        self.address = kernels.Lane(
            start.span.base,
            start.span.length,
            len(self._due),
            start.nodes,
            start.depth,
            len(self._ends),
            address(self._features_RF),
            self._due.buffer_info()[0],
            self._ends.buffer_info()[0],
            start.hidden_1C.data_ptr(),
            start.ratio,
            ctypes.addressof(self._tokens),
            ctypes.addressof(self._parents),
            ctypes.addressof(self._beliefs),
        )

    def draft(self, count: int) -> Draft:
        return Draft(self._tokens[:count], self._parents[:count], self._beliefs[:count])
