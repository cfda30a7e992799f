"""Rounds of an EAGLE draft, each in one compiled call (kernels/eagle.c).

R rows that are due, F features per row, C hidden size, V vocabulary of the target, U of the draft.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from torch import Tensor

from forerun.models import kernels
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.heads.rounds import Rounds, Rules, Tree
from forerun.models.layers import Layer

LANE = Struct("4i3P")  # mirror of `Lane` in kernels/eagle.c


class Start(NamedTuple):
    """Where a request stands before a round, and how deep its tree may grow.

    features_RTE, tokens: what its next rows are fed; None: no row is due. hidden_1C: what its last
    row handed on, written over if rows are due.
    """

    span: Span
    features_RTE: Tensor | None
    tokens: Sequence[int]
    hidden_1C: Tensor
    depth: int


class NetworkOfRound(ctypes.Structure):
    """Mirror of `Network` in kernels/eagle.c."""

    _fields_ = (
        ("bf16", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("features", ctypes.c_int32),
        ("layer_count", ctypes.c_int32),
        ("norm_count", ctypes.c_int32),
        ("layers", ctypes.c_void_p),
        ("feature_norms", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("fc", kernels.Matrix),
        ("head", kernels.Matrix),
        ("last_norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("norm_output", ctypes.c_int32),
        ("joins", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Network:
    """What rows are computed with.

    feature_norms: of equal parts of the features. norm_eps: of all norms outside of layers. joins:
    fc reads embedding and state of every row, and features are states (EAGLE-1); otherwise it makes
    states of features (EAGLE-3).
    """

    layers: Sequence[Layer]
    embedding_VC: Tensor
    fc: PackedMatrix
    head: PackedMatrix
    feature_norms: Sequence[Tensor]
    last_norm_C: Tensor | None
    norm_eps: float
    norm_output: bool
    joins: bool
    ids_U: Tensor | None


class EagleRounds(Rounds):
    """Rows that are due and trees over them, for all requests of a batch."""

    def __init__(self, backend: Compiled, store: KVStore, network: Network) -> None:
        super().__init__(backend.lib)
        self._backend, self._store = backend, store
        self._network = n = network  # keeps alive what the addresses point to
        norms = [norm_C.data_ptr() for norm_C in n.feature_norms]
        self._norms = (ctypes.c_void_p * len(norms))(*norms)
        self._address = NetworkOfRound(
            backend.bf16,
            backend.config.hidden_size,
            backend.config.hidden_size if n.joins else n.fc.address.in_,
            len(n.layers),
            len(norms),
            None,  # layers move with the positions that are in use
            ctypes.addressof(self._norms),
            n.embedding_VC.data_ptr(),
            n.fc.address,
            n.head.address,
            address(n.last_norm_C),
            n.norm_eps,
            n.norm_output,
            n.joins,
            n.head.outputs,
            address(n.ids_U),
        )

    def draft(
        self, starts: Sequence[Start], trees: Sequence[Tree], rules: Rules, floor: float
    ) -> None:
        """Grow what `Growth` would, depth first; see there for the floor. Rows that were due are
        written behind those of their span, but not committed."""
        positions = max(start.span.length + len(start.tokens) + start.depth for start in starts)
        layers = self._backend.addresses_in(self._store, positions, self._network.layers)
        self._address.layers = ctypes.addressof(layers)
        due = array("q", [token for start in starts for token in start.tokens])
        lanes = _lanes(starts, due.buffer_info()[0])
        self._run(self._lib.eagle_round, self._address, rules, trees, floor, lanes)


def _lanes(starts: Sequence[Start], due_at: int) -> bytes:
    """The requests as compiled code sees them. due_at: the tokens of all, one after the other."""
    lanes = []
    for span, features_RTE, tokens, hidden_1C, depth in starts:
        due = len(tokens)
        fed = address(features_RTE) or 0
        at = hidden_1C.data_ptr()
        lanes.append(LANE.pack(span.base, span.length, due, depth, fed, due_at, at))
        due_at += 8 * due
    return b"".join(lanes)
