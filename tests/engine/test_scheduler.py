"""Who runs, with how many rows, and who has to wait."""

from __future__ import annotations

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.engine.scheduler import Batch, Scheduler
from forerun.errors import ConfigError
from forerun.models.cache import KVStore

SAMPLING = SamplingParams(max_tokens=100)


def scheduler(slots: int = 1000, seqs: int = 4, rows: int = 16) -> Scheduler:
    store = KVStore(1, 1, 1, slots, torch.float32, torch.device("cpu"))
    return Scheduler(store, seqs, rows)


def request(id: int, length: int) -> Request:
    return Request(id, [1] * length, length, SAMPLING, seed=0)


def summary(batch: Batch) -> list[tuple[int, int, bool, bool]]:
    return [(t.request.id, t.rows, t.decides, t.decoding) for t in batch.turns]


def pass_over(scheduler: Scheduler) -> list[tuple[int, int, bool, bool]]:
    """One step as the engine does it: every row is kept, every decision adds a token."""
    batch = scheduler.schedule()
    for turn in batch.turns:
        assert turn.request.span
        scheduler.store.commit(turn.request.span, range(turn.rows))
        if turn.decides:
            turn.request.tokens.append(1)
    return summary(batch)


def test_long_prompts_come_in_chunks_behind_those_who_decode() -> None:
    queue = scheduler(rows=16)
    queue.add(request(0, 3))
    assert pass_over(queue) == [(0, 3, True, False)]
    queue.add(request(1, 40))
    assert pass_over(queue) == [(0, 1, True, True), (1, 15, False, False)]
    assert pass_over(queue) == [(0, 1, True, True), (1, 15, False, False)]
    assert pass_over(queue) == [(0, 1, True, True), (1, 10, True, False)]
    assert pass_over(queue) == [(0, 1, True, True), (1, 1, True, True)]


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    queue = scheduler()
    queue.add(request(0, 1))
    assert pass_over(queue) == [(0, 1, True, True)]


def test_rows_that_nobody_needs_are_left_for_drafts() -> None:
    queue = scheduler(rows=16)
    queue.add(request(0, 3))
    assert queue.schedule().rows_left == 13


def test_new_requests_join_while_others_run_and_in_their_order() -> None:
    queue = scheduler(seqs=2, rows=16)
    for id in range(4):
        queue.add(request(id, 2))
    assert [turn[0] for turn in pass_over(queue)] == [0, 1]
    queue.remove(queue.running[0])
    assert [turn[0] for turn in pass_over(queue)] == [1, 2]
    queue.remove(queue.running[1])
    assert [turn[0] for turn in pass_over(queue)] == [1, 3]


def test_who_waits_can_be_removed() -> None:
    queue = scheduler(seqs=1)
    first, second = request(0, 2), request(1, 2)
    queue.add(first)
    queue.add(second)
    queue.schedule()
    queue.remove(second)
    queue.remove(first)
    assert not queue.busy
    assert queue.store.free_slots == queue.store.slots


def test_nobody_is_admitted_without_slots_for_all_tokens() -> None:
    queue = scheduler(slots=100, rows=64)
    queue.add(request(0, 50))
    queue.add(request(1, 51))
    queue.add(request(2, 3))
    assert [turn[0] for turn in pass_over(queue)] == [0], "and nobody overtakes"
    queue.remove(queue.running[0])
    assert [turn[0] for turn in pass_over(queue)] == [1, 2]


def test_the_youngest_makes_room_and_comes_back_first() -> None:
    queue = scheduler(slots=320, rows=256)
    oldest = request(0, 64)
    for each in (oldest, request(1, 64), request(2, 64), request(3, 64)):
        queue.add(each)
    assert [turn[0] for turn in pass_over(queue)] == [0, 1, 2]
    preempted: list[int] = []
    while not preempted:
        batch = queue.schedule()
        preempted += [each.id for each in batch.preempted]
        assert set(preempted).isdisjoint(turn.request.id for turn in batch.turns)
        for turn in batch.turns:
            assert turn.request.span
            queue.store.commit(turn.request.span, range(turn.rows))
            turn.request.tokens.append(1)
        queue.store.check()
    assert preempted == [2]
    assert [each.id for each in queue.waiting] == [2, 3]
    assert queue.waiting[0].span is None
    assert len(queue.waiting[0].tokens) > 64, "its output is kept"
    queue.remove(oldest)
    assert pass_over(queue)[1][0] == 2, "back, with its tokens to compute again"


def test_every_sequence_needs_a_row() -> None:
    with pytest.raises(ConfigError, match="max_batch_rows 4 cannot hold max_num_seqs 5"):
        scheduler(seqs=5, rows=4)
    with pytest.raises(ConfigError):
        scheduler(seqs=0)
