"""Ratios of right tokens to expected ones, which Python and kernels/rounds.c both learn."""

from __future__ import annotations

import ctypes
from array import array

WEIGHT = 8.0  # expected tokens that a ratio of 1 counts for at first


class Ratios(ctypes.Structure):
    """So many ratios, all 1 at first. `values` holds them; mirror of `Ratios` in kernels/rounds.h.

    memory: expected tokens after which old ones start to fade.
    """

    _fields_ = (
        ("right_at", ctypes.c_void_p),
        ("expected_at", ctypes.c_void_p),
        ("values_at", ctypes.c_void_p),
        ("memory", ctypes.c_double),
    )

    def __init__(self, count: int, memory: float) -> None:
        self.right = array("d", [WEIGHT]) * count
        self.expected = array("d", [WEIGHT]) * count
        self.values = array("d", [1.0]) * count
        arrays = (self.right, self.expected, self.values)
        super().__init__(*(each.buffer_info()[0] for each in arrays), memory)

    def learn(self, at: int, expected: float, right: int) -> None:
        """Count some tokens of the ratio `at`."""
        if self.expected[at] > self.memory:
            self.right[at] *= 0.5
            self.expected[at] *= 0.5
        self.expected[at] += expected
        self.right[at] += right
        self.values[at] = self.right[at] / self.expected[at]
