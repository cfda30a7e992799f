"""Rounds of Medusa heads, each in one compiled call (kernels/medusa.c).

C hidden size, U tokens that logits are given of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.models import kernels
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.heads.rounds import Ranked, Rounds, Rules, Tree, in_a_row


@dataclass(frozen=True, slots=True)
class Heads:
    """What heads compute with. norm_C: the target's last.

    first: the first layers of all heads side by side, None where there are none. others: per later
    layer, that of each head. outputs: the matrix of each head, or one for all.
    """

    count: int
    norm_C: Tensor
    first: PackedMatrix | None
    others: Sequence[Sequence[PackedMatrix]]
    outputs: Sequence[PackedMatrix]
    ids_U: Tensor | None


class HeadsOfRound(ctypes.Structure):
    """Mirror of `Heads` in kernels/medusa.c."""

    _fields_ = (
        ("bf16", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("layers", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("first", kernels.Matrix),
        ("others", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
    )


class MedusaRounds(Rounds):
    """The heads of all requests of a batch, and trees of what they say."""

    def __init__(self, backend: Compiled, heads: Heads) -> None:
        super().__init__(backend.lib)
        self._row = backend.config.hidden_size * backend.dtype.itemsize
        self._heads = heads  # keeps alive what the addresses point to
        self._others = _matrices([matrix for layer in heads.others for matrix in layer])
        self._outputs = _matrices(heads.outputs)
        self._address = HeadsOfRound(
            backend.bf16,
            backend.config.hidden_size,
            heads.count,
            len(heads.others) + (heads.first is not None),
            len(heads.outputs) < heads.count,
            heads.outputs[0].outputs,
            heads.norm_C.data_ptr(),
            backend.config.norm_eps,
            kernels.Matrix() if heads.first is None else heads.first.address,
            ctypes.addressof(self._others),
            ctypes.addressof(self._outputs),
            address(heads.ids_U),
        )

    def draft(
        self,
        states: Sequence[Tensor],
        trees: Sequence[Tree],
        rules: Rules,
        ranked: Sequence[Ranked] = (),
    ) -> None:
        """Grow what `best_tree` would make of the heads' logits. states: of each request, what the
        target's last layer gave, contiguous; the last row counts, [.., C]. ranked: if there are
        any, they are filled, and trees only say what is wanted."""
        last = [state_RC.data_ptr() + (state_RC.shape[0] - 1) * self._row for state_RC in states]
        addresses = (ctypes.c_void_p * len(last))(*last)
        given = in_a_row(ranked)
        self._run(self._lib.medusa_round, self._address, rules, trees, addresses, given)


def _matrices(matrices: Sequence[PackedMatrix]) -> ctypes.Array[kernels.Matrix]:
    return (kernels.Matrix * len(matrices))(*[matrix.address for matrix in matrices])
