"""Rows of many texts in one step: nothing is lost, made up or torn apart."""

import torch
from torch import Tensor

from forerun.train.shuffle import ShuffleBuffer


def steps(buffer: ShuffleBuffer, sizes: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """What came in and what left, step by step; both tensors of a row say the same."""
    first, came, left = 0, [], []
    for step, size in enumerate(sizes):
        rows_N = torch.arange(first, first + size)
        first += size
        noise = torch.Generator().manual_seed(step)
        one_N, pairs_N2 = buffer([rows_N, torch.stack([rows_N, -rows_N], 1)], noise)
        assert torch.equal(pairs_N2, torch.stack([one_N, -one_N], 1))
        came.append(rows_N.tolist())
        left.append(one_N.tolist())
    return came, left


def test_as_many_leave_as_come_and_none_twice_once_it_is_full() -> None:
    came, left = steps(ShuffleBuffer(64), [16] * 100)
    assert [len(rows) for rows in left] == [16] * 100
    assert all(len(set(rows)) == len(rows) for rows in left)
    full = [row for rows in left[4:] for row in rows]
    assert len(set(full)) == len(full)
    assert set(range(1600)) - {row for rows in left for row in rows} <= set(range(1600 - 640, 1600))
    mixed = [rows != new for rows, new in zip(left, came, strict=True)]
    assert all(mixed[1:])


def test_a_step_learns_from_many_earlier_ones() -> None:
    _, left = steps(ShuffleBuffer(64), [16] * 100)
    sources = {row // 16 for row in left[-1]}
    assert len(sources) > 3


def test_the_step_that_fills_it_loses_nothing() -> None:
    _, left = steps(ShuffleBuffer(20), [16, 16, 16, 16])
    late = [row for rows in left[1:] for row in rows]
    assert len(set(late)) >= 64 - 20 - 16


def test_more_rows_than_there_is_room_for_pass_through() -> None:
    came, left = steps(ShuffleBuffer(8), [8, 12])
    assert left == came


def test_what_leaves_is_a_copy() -> None:
    buffer = ShuffleBuffer(4)
    noise = torch.Generator().manual_seed(0)
    left: list[Tensor] = [buffer([torch.full((2,), step)], noise)[0] for step in range(6)]
    then = [rows.tolist() for rows in left]
    buffer([torch.full((2,), 9)], noise)
    assert [rows.tolist() for rows in left] == then


def test_what_another_kept_goes_on_as_there() -> None:
    one, other = ShuffleBuffer(32), ShuffleBuffer(32)
    assert one.rows == []
    steps(one, [16])
    other.fill(one.rows)
    assert steps(one, [16, 16, 16]) == steps(other, [16, 16, 16])
