"""Greedy rounds of an EAGLE-3 draft, each in one compiled call (kernels/drafting.c).

R rows that are due, F features per row, C hidden size, V vocabulary of the target, U of the draft.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forerun.core import Draft
from forerun.errors import CapacityError
from forerun.models import kernels
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.layers import Layer


class Rules(NamedTuple):
    """How trees grow. See `Growth` for width and floor and `Calibration` for the others.

    ratios: per bin of beliefs and one more, by which they are multiplied. most: the largest chance.
    """

    width: int
    floor: float
    ratios: array[float]
    most: float


class Start(NamedTuple):
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
        self._trees = _Trees(0)
        self.seconds = 0.0

    def draft(self, starts: Sequence[Start], rules: Rules) -> list[Draft]:
        """What `Growth` would grow, depth first; survival is the belief in each node given its
        parent. Rows that were due are written behind those of their span, but not committed."""
        positions = max(start.span.length + len(start.tokens) + start.depth for start in starts)
        layers = self._backend.addresses_in(self._store, positions, self._network.layers)
        self._address.layers = ctypes.addressof(layers)
        width, floor, ratios, most = rules
        address_of_rules = kernels.Rules(
            width, len(ratios) - 1, floor, most, ratios.buffer_info()[0]
        )
        trees = self._trees_for(sum(start.nodes for start in starts))
        due = array("q", [token for start in starts for token in start.tokens])
        ends = array("q", [token for start in starts for token in start.ends])
        lanes = _lanes(starts, due, ends, trees)
        self.seconds = self._backend.lib.draft_round(
            ctypes.byref(self._address), ctypes.byref(address_of_rules), lanes, len(lanes)
        )
        if self.seconds < 0:
            raise CapacityError("no memory for a round of drafting; ask for fewer requests at once")
        drafts, begin = [], 0
        for start, lane in zip(starts, lanes, strict=True):
            drafts.append(trees.draft(begin, begin + lane.count))
            begin += start.nodes
        return drafts

    def _trees_for(self, nodes: int) -> _Trees:
        if nodes > self._trees.nodes:
            self._trees = _Trees(nodes)
        return self._trees


class _Trees:
    """Room for the nodes of all trees of a round, kept: fresh arrays would cost more than that."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._tokens = (ctypes.c_int64 * nodes)()
        self._parents = (ctypes.c_int32 * nodes)()
        self._beliefs = (ctypes.c_double * nodes)()
        arrays = (self._tokens, self._parents, self._beliefs)
        self._addresses = [ctypes.addressof(each) for each in arrays]

    def addresses(self, node: int) -> tuple[int, int, int]:
        """Where a tree lies whose first node this is."""
        tokens, parents, beliefs = self._addresses
        return tokens + 8 * node, parents + 4 * node, beliefs + 8 * node

    def draft(self, begin: int, end: int) -> Draft:
        return Draft(self._tokens[begin:end], self._parents[begin:end], self._beliefs[begin:end])


def _lanes(
    starts: Sequence[Start], due: array[int], ends: array[int], trees: _Trees
) -> ctypes.Array[kernels.Lane]:
    """The requests as compiled code sees them. due, ends: their tokens, one after the other."""
    lanes = []
    due_at, ends_at, node = due.buffer_info()[0], ends.buffer_info()[0], 0
    for start in starts:
        lanes.append(
            kernels.Lane(
                start.span.base,
                start.span.length,
                len(start.tokens),
                start.nodes,
                start.depth,
                len(start.ends),
                address(start.features_RF),
                due_at,
                ends_at,
                start.hidden_1C.data_ptr(),
                start.ratio,
                *trees.addresses(node),
            )
        )
        due_at += due.itemsize * len(start.tokens)
        ends_at += ends.itemsize * len(start.ends)
        node += start.nodes
    return (kernels.Lane * len(lanes))(*lanes)
