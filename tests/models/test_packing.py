"""Rows that wait for a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.packing import add, joined


def test_rows_that_wait_keep_no_others_alive() -> None:
    """Only the newest may be a view of all rows of its pass."""
    passes = [torch.randn(9, 2) for _ in range(3)]
    waiting: list[Tensor] = []
    for rows in passes:
        add(waiting, rows[2:5])
    assert torch.equal(joined(waiting), torch.cat([rows[2:5] for rows in passes]))
    held = [part.untyped_storage().nbytes() // part.itemsize for part in waiting]
    assert held == [6, 6, 18]
