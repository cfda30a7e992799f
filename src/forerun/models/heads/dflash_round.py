"""Rounds of a DFlash draft, each in one compiled call (kernels/dflash.c).

R context tokens that are due, F features of each, C hidden size, V vocabulary of the target, U of
the draft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from torch import Tensor

from forerun.models import kernels
from forerun.models.cache import KVStore, Span
from forerun.models.compiled import Compiled, PackedMatrix, address
from forerun.models.heads.rounds import Ranked, Rounds, Rules, Tree, in_a_row
from forerun.models.layers import Layer

BLOCK = Struct("3iPq")  # mirror of `Block` in kernels/dflash.c


class Start(NamedTuple):
    """Where a request stands before a round. due: context tokens without keys and values, taps_RF
    what they are fed; None: there are none. anchor: its last committed token."""

    span: Span
    due: int
    taps_RF: Tensor | None
    anchor: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """What blocks are computed with. mask_C: what the slots behind the anchor read."""

    layers: Sequence[Layer]
    embedding_VC: Tensor
    mask_C: Tensor
    fc: PackedMatrix
    head: PackedMatrix
    context_norm_C: Tensor
    last_norm_C: Tensor
    first_slot: int
    ids_U: Tensor | None


class BlocksOfRound(ctypes.Structure):
    """Mirror of `Blocks` in kernels/dflash.c."""

    _fields_ = (
        ("bf16", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("features", ctypes.c_int32),
        ("layer_count", ctypes.c_int32),
        ("layers", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("fc", kernels.Matrix),
        ("head", kernels.Matrix),
        ("context_norm", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("first_slot", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
    )


class DFlashRounds(Rounds):
    """Context that is due, blocks behind it, and trees of what their slots say, for all requests of
    a batch."""

    def __init__(self, backend: Compiled, store: KVStore, blocks: Blocks) -> None:
        super().__init__(backend.lib)
        self._backend, self._store = backend, store
        self._blocks = b = blocks  # keeps alive what the addresses point to
        self._address = BlocksOfRound(
            backend.bf16,
            backend.config.hidden_size,
            b.fc.address.in_,
            len(b.layers),
            None,  # layers move with the positions that are in use
            b.embedding_VC.data_ptr(),
            b.mask_C.data_ptr(),
            b.fc.address,
            b.head.address,
            b.context_norm_C.data_ptr(),
            b.last_norm_C.data_ptr(),
            backend.config.norm_eps,
            b.first_slot,
            b.head.outputs,
            address(b.ids_U),
        )

    def draft(
        self,
        starts: Sequence[Start],
        trees: Sequence[Tree],
        rules: Rules,
        slots: int,
        ranked: Sequence[Ranked] = (),
    ) -> None:
        """Grow what `best_tree` would make of the logits of blocks of so many slots. Context that
        was due is written behind that of its span, but not committed. ranked: if there are any,
        they are filled, and trees only say what is wanted."""
        blocks = []
        positions = 0
        for span, due, taps_RF, anchor in starts:
            fed = address(taps_RF) or 0
            blocks.append(BLOCK.pack(span.base, span.length, due, fed, anchor))
            positions = max(positions, span.length + due + slots)
        layers = self._backend.addresses_in(self._store, positions, self._blocks.layers)
        self._address.layers = ctypes.addressof(layers)
        due_blocks, given = b"".join(blocks), in_a_row(ranked)
        self._run(self._lib.dflash_round, self._address, rules, trees, slots, due_blocks, given)
