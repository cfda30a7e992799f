"""Rounds of an EAGLE draft, each in one compiled call (kernels/eagle.c).

R rows that are due, F features per row, C hidden size, V vocabulary of the target, U of the draft.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from forerun.models import kernels
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.heads.rounds import Rounds, Rules, Tree
from forerun.models.layers import Layer


class Start(NamedTuple):
    """Where a request stands before a round, and how deep its tree may grow.

    features_RF, tokens: what its next rows are fed; None: no row is due. hidden_1C: what its last
    row handed on, written over if rows are due.
    """

    span: Span
    features_RF: Tensor | None
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


class Lane(ctypes.Structure):
    """Mirror of `Lane` in kernels/eagle.c."""

    _fields_ = (
        ("base", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("due", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("fed", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
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
        super().__init__(backend)
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
        lanes = _lanes(starts, due)
        self._run(self._lib.eagle_round, self._address, rules, trees, floor, lanes)


def _lanes(starts: Sequence[Start], due: array[int]) -> ctypes.Array[Lane]:
    """The requests as compiled code sees them. due: the tokens of all, one after the other."""
    lanes: list[Any] = []  # tuples, which ctypes makes structures of
    due_at = due.buffer_info()[0]
    for start in starts:
        lanes.append(
            (
                start.span.base,
                start.span.length,
                len(start.tokens),
                start.depth,
                address(start.features_RF),
                due_at,
                start.hidden_1C.data_ptr(),
            )
        )
        due_at += due.itemsize * len(start.tokens)
    return (Lane * len(lanes))(*lanes)
