"""Rows of many texts in one step.

The rows of a text are alike, and a step that sees two texts learns of two subjects. Where rows do
not depend on each other, a shuffle buffer, as loaders of data have, mixes those of many texts.

N rows that come in and leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ShuffleBuffer:
    """Keeps `size` rows. As many leave as come in, drawn from those that were kept, and the new
    ones take their places; until it is full, what leaves also stays."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[Tensor] = []
        self._count = 0

    @property
    def rows(self) -> list[Tensor]:
        """All that are kept, tensors [up to `size`, ...] that belong together; none before the
        first came."""
        return [kept[: self._count] for kept in self._kept]

    def fill(self, rows: Sequence[Tensor]) -> None:
        """Put what another buffer of this size kept in the place of what is here."""
        self._count = len(rows[0]) if rows else 0
        self._make_room(rows)
        for kept, each in zip(self._kept, rows, strict=True):
            kept[: self._count] = each

    def __call__(self, rows: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """rows: tensors [N, ...] that belong together. generator: on the CPU.

        More rows than there is room for leave in the order in which they came.
        """
        count = len(rows[0])
        if count >= self._size:
            return list(rows)
        if not self._kept:
            self._make_room(rows)
        room = min(count, self._size - self._count)
        end = self._count + room
        for kept, new in zip(self._kept, rows, strict=True):
            kept[self._count : end] = new[:room]
        self._count = end
        places_N = torch.randperm(end, generator=generator)[:count].to(rows[0].device)
        left = [kept[places_N] for kept in self._kept]
        for kept, new in zip(self._kept, rows, strict=True):
            kept[places_N[: count - room]] = new[room:]
        return left

    def _make_room(self, rows: Sequence[Tensor]) -> None:
        """For so many tensors of such rows."""
        self._kept = [each.new_empty(self._size, *each.shape[1:]) for each in rows]
