"""What a pass of the target costs, by its number of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from forerun.models.cache import KVStore
from forerun.models.target import Segment, Target

ROWS = (1, 8, 32)
REPEATS = 2  # beside a first pass that warms up


class Costs:
    """Seconds of a pass over N rows: straight lines between measured points, and on from the last.

    points: rows -> seconds, in ascending order of rows.
    """

    def __init__(self, points: dict[int, float]) -> None:
        # More rows are never cheaper: what looks so is the clock's noise.
        measured = list(zip(points, accumulate(points.values(), max), strict=True))
        self._rows = [rows for rows, _ in measured]
        self._seconds = [seconds for _, seconds in measured]
        self._known: list[float] = []

    def __getitem__(self, rows: int) -> float:
        while len(self._known) <= rows:
            self._known.append(self._interpolate(len(self._known)))
        return self._known[rows]

    def _interpolate(self, rows: int) -> float:
        if len(self._rows) == 1 or rows <= self._rows[0]:
            return self._seconds[0]
        right = next((i for i, r in enumerate(self._rows) if r >= rows), len(self._rows) - 1)
        x0, x1 = self._rows[right - 1 : right + 1]
        y0, y1 = self._seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


@torch.inference_mode()
def measure(target: Target, store: KVStore) -> Costs:
    """Time a few passes over scratch rows; takes milliseconds and leaves the store as it was."""
    limit = min(store.slots, target.info.max_length)
    return Costs({rows: _time(target, store, rows) for rows in ROWS if rows <= limit})


def _time(target: Target, store: KVStore, rows: int) -> float:
    """The fastest of a few passes: other work on the machine only ever adds."""
    span = store.open()
    store.reserve(span, rows)
    try:
        segments = [Segment(span, [0] * rows)]
        return min(_clock(target, store, segments) for _ in range(REPEATS + 1))
    finally:
        store.release(span)


def _clock(target: Target, store: KVStore, segments: Sequence[Segment]) -> float:
    begin = time.perf_counter()
    target.forward(segments, store).logits_NV[-1:].argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - begin
