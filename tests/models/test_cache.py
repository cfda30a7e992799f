"""The store against a plain Python model of it."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.errors import CapacityError
from forerun.models.cache import KVStore, Span

CPU = torch.device("cpu")


class Model:
    """A store beside lists of what every span must hold."""

    def __init__(self, slots: int, seed: int) -> None:
        self.store = KVStore(2, 1, 3, slots, torch.float32, CPU)
        self.kept: dict[Span, list[float]] = {}
        self.dice = random.Random(seed)
        self.refused = self.packed = 0
        self.value = 0.0

    def held(self, span: Span) -> list[float]:
        """What the store holds, if all layers, heads and dimensions agree."""
        slots = self.store.kv[:, :, :, span.base : span.base + span.length]
        assert (slots == slots[:1, :1, :1, :, :1]).all()
        return slots[0, 0, 0, :, 0].tolist()

    def act(self) -> None:
        choice = self.dice.random()
        if not self.kept or (choice < 0.1 and len(self.kept) < 6):
            self.kept[self.store.open()] = []
        span = self.dice.choice(list(self.kept))
        if choice < 0.75:
            self.grow(span, self.dice.choice([1, 1, 1, 2, 5, 30]))
        elif choice < 0.85:
            length = self.dice.randrange(len(self.kept[span]) + 1)
            self.store.truncate(span, length)
            del self.kept[span][length:]
        elif choice > 0.93:
            self.store.release(span)
            del self.kept[span]

    def grow(self, span: Span, rows: int) -> None:
        """A pass that writes `rows` rows and keeps some of them."""
        bases = {other: other.base for other in self.kept}
        try:
            self.store.reserve(span, rows)
        except CapacityError:
            self.refused += 1
            needed = len(self.kept[span]) + rows
            others = sum(other.capacity for other in self.kept if other is not span)
            assert self.store.slots - others < needed, "there was room"
            return
        self.packed += sum(other.base != base for other, base in bases.items()) > 1
        written = []
        for row in range(rows):
            self.value += 1
            written.append(self.value)
            self.store.kv[:, :, :, span.base + span.length + row] = self.value
        path = sorted(self.dice.sample(range(rows), self.dice.randrange(rows + 1)))
        self.store.commit(span, path)
        self.kept[span] += [written[row] for row in path]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_lose_nothing(seed: int) -> None:
    model = Model(slots=250, seed=seed)
    for _ in range(800):
        model.act()
        model.store.check()
        for span, values in model.kept.items():
            assert model.held(span) == values
    assert model.refused, "the store was full at times"
    assert model.packed, "and had to be packed"


def test_a_refused_span_is_as_it_was() -> None:
    store = KVStore(1, 1, 1, 100, torch.float32, CPU)
    first, second = store.open(), store.open()
    store.reserve(first, 90)
    store.commit(first, range(80))
    with pytest.raises(CapacityError, match="kv_tokens"):
        store.reserve(second, 11)
    with pytest.raises(CapacityError):
        store.reserve(first, 21)
    assert (first.base, first.length, first.capacity) == (0, 80, 90)
    assert store.free_slots == 10
    store.check()
    store.release(first)
    store.reserve(second, 100)
    assert store.free_slots == 0


def test_check_sees_an_overlap() -> None:
    store = KVStore(1, 1, 1, 200, torch.float32, CPU)
    first, second = store.open(), store.open()
    store.reserve(first, 10)
    store.reserve(second, 10)
    store.check()
    second.base -= 1
    with pytest.raises(AssertionError, match="overlaps"):
        store.check()


def test_no_memory_is_one_clear_line() -> None:
    with pytest.raises(CapacityError, match="ask for fewer with kv_tokens"):
        KVStore(32, 8, 128, 1 << 45, torch.bfloat16, CPU)
