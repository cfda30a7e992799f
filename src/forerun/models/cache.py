"""The key/value store: one arena of slots, in which every sequence owns one contiguous span.

A span grows by `reserve`, moving to a larger gap when its neighbours are in the way, so nothing has
to be set aside for tokens that may never come. A pass writes its rows behind the committed ones:

    slots of a span:   0 ........ length | length + 0, length + 1, ... | ........ capacity
    what they hold:    committed prefix  | rows of the running pass    | free

    before commit      the drafted rows lie in the order in which they were packed
    commit(path)       the rows in `path` move to length, length + 1, ... and length grows by
                       len(path); all other rows are forgotten, the next pass overwrites them
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.errors import CapacityError

MIN_SPAN = 64  # slots; smaller spans would move too often


class Span:
    """The place of one sequence in a store. `length` slots are committed."""

    __slots__ = ("base", "capacity", "length")

    def __init__(self, base: int, capacity: int) -> None:
        self.base = base
        self.capacity = capacity
        self.length = 0

    def __repr__(self) -> str:
        return f"Span(base={self.base}, length={self.length}, capacity={self.capacity})"


class KVStore:
    """Keys and values of all sequences, `kv` of shape [layers, 2, kv_heads, slots, head_dim]."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        try:
            self.kv = _zeros((layers, 2, kv_heads, slots, head_dim), dtype, device)
        except (RuntimeError, OSError, OverflowError, torch.OutOfMemoryError) as error:
            size = 2 * layers * kv_heads * head_dim * slots * dtype.itemsize / 2**30
            raise CapacityError(
                f"no memory for a key/value store of {slots} tokens ({size:.1f} GiB); "
                "ask for fewer with kv_tokens"
            ) from error
        self.slots = slots
        self.spans: list[Span] = []  # ordered by base

    @property
    def free_slots(self) -> int:
        return self.slots - sum(span.capacity for span in self.spans)

    def open(self) -> Span:
        """A new, empty span; it takes slots when it first reserves."""
        return Span(0, 0)

    def reserve(self, span: Span, rows: int) -> None:
        """Make room for `rows` more rows behind the committed ones.

        Raises `CapacityError` when no gap is large enough even after packing; the span is then as
        it was.
        """
        needed = span.length + rows
        if needed <= span.capacity:
            return
        wanted = max(MIN_SPAN, needed + needed // 2)
        if self._grow_in_place(span, wanted) or self._move(span, wanted):
            return
        if self._grow_in_place(span, needed) or self._move(span, needed):
            return
        if self.free_slots + span.capacity < needed:
            raise CapacityError(
                f"the key/value store is full: {needed} slots needed, "
                f"{self.free_slots + span.capacity} free; ask for more with kv_tokens"
            )
        self._pack_before(span)
        assert self._grow_in_place(span, needed) or self._move(span, needed)

    def extend(self, span: Span, rows: int) -> None:
        """Keep the first so many rows of the last pass of a span."""
        span.length += rows
        assert span.length <= span.capacity

    def commit(self, span: Span, path: Sequence[int]) -> None:
        """Keep the rows `path` (indices into the rows of the last pass, ascending) of a span."""
        start = span.base + span.length
        moved = next((i for i, row in enumerate(path) if row != i), len(path))
        if moved < len(path):
            source = torch.tensor([start + row for row in path[moved:]], device=self.kv.device)
            self.kv[:, :, :, start + moved : start + len(path)] = self.kv[:, :, :, source]
        self.extend(span, len(path))

    def truncate(self, span: Span, length: int) -> None:
        """Forget all committed slots from `length` on."""
        assert 0 <= length <= span.length
        span.length = length

    def release(self, span: Span) -> None:
        """Give all slots of a span back."""
        if span.capacity:
            self.spans.remove(span)
        span.base = span.capacity = span.length = 0

    def check(self) -> None:
        """Assert that spans are ordered, disjoint, inside the arena and not over-full."""
        end = 0
        for span in self.spans:
            assert span.base >= end, f"{span} overlaps its neighbour"
            assert 0 <= span.length <= span.capacity, f"{span} is over-full"
            end = span.base + span.capacity
        assert end <= self.slots, "a span ends outside the store"

    def _end_of_gap(self, index: int) -> int:
        """First slot behind the gap that follows spans[index]."""
        return self.spans[index + 1].base if index + 1 < len(self.spans) else self.slots

    def _grow_in_place(self, span: Span, capacity: int) -> bool:
        if not span.capacity:
            return False
        if span.base + capacity > self._end_of_gap(self.spans.index(span)):
            return False
        span.capacity = capacity
        return True

    def _move(self, span: Span, capacity: int) -> bool:
        """Move to the first gap of `capacity` slots."""
        begin = 0
        for other in [*self.spans, Span(self.slots, 0)]:
            if other.base - begin >= capacity:
                self._place(span, begin, capacity)
                return True
            begin = other.base + other.capacity
        return False

    def _place(self, span: Span, base: int, capacity: int) -> None:
        if span.capacity:
            self.spans.remove(span)
        self._copy(span.base, base, span.length)
        span.base, span.capacity = base, capacity
        self.spans.append(span)
        self.spans.sort(key=lambda s: s.base)

    def _pack_before(self, last: Span) -> None:
        """Close all gaps by moving every span to the front, `last` behind the others."""
        own = self.kv[:, :, :, last.base : last.base + last.length].clone()
        others = [span for span in self.spans if span is not last]
        begin = 0
        for span in others:
            self._copy(span.base, begin, span.length)
            span.base = begin
            begin += span.capacity
        if last.capacity:
            last.base = begin
            self.kv[:, :, :, begin : begin + last.length] = own
            self.spans = [*others, last]

    def _copy(self, source: int, target: int, rows: int) -> None:
        if rows and source != target:
            moved = self.kv[:, :, :, source : source + rows]
            overlaps = abs(source - target) < rows
            self.kv[:, :, :, target : target + rows] = moved.clone() if overlaps else moved


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: masked slots take part in sums with weight 0, and 0 * nan is nan.

    On the CPU a page takes memory when it is first written: a large store costs what is used of it,
    where `torch.zeros` writes, and so occupies, all of it at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
