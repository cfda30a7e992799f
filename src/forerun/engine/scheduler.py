"""Who runs in the next pass, and with how many rows. Knows no tensors.

    waiting   requests without slots, first come, first served
    running   requests with slots, in the order of their arrival

Decoding requests run first, one row each; what is left of the row budget goes to prompts, in
chunks where they are longer, and to new requests. When the store is full, the youngest running
request goes back to the front of the queue, and its tokens are computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from forerun.core import PHASES, Draft, Request, Verdict
from forerun.errors import CapacityError, ConfigError
from forerun.models.cache import KVStore

NOTHING = Draft()
MAX_NUM_SEQS = 32
MAX_BATCH_ROWS = 512


@dataclass(slots=True)
class Turn:
    """One request's part in a pass: some of its pending tokens, then the nodes of its draft."""

    request: Request
    rows: int  # pending tokens that are fed
    decides: bool  # they are all of them, so the pass decides what follows
    decoding: bool  # all tokens but the last one lay in the store, so it may speculate
    budget: int = 0  # nodes its drafter was asked for
    draft: Draft = NOTHING
    verdict: Verdict | None = None  # set where the pass decides
    followed: bool = True  # those who read hidden states keep up with it, and may be asked
    way: int = -1  # in which way the drafter is asked; -1 asks all of it
    drafting: float = 0.0  # seconds of the round, shared evenly among those it was for


class Clock:
    """Seconds of the phases of a step, which begins now."""

    __slots__ = ("_begin", "_last", "seconds")

    def __init__(self) -> None:
        self._begin = self._last = perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> float:
        """What happened since the last lap belongs to `phase`; how long that was."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        self.seconds[phase] += seconds
        return seconds

    @property
    def total(self) -> float:
        return perf_counter() - self._begin

    @property
    def speculating(self) -> float:
        """Seconds of drafting and of the decisions about it: both take the longer, the more is
        asked for."""
        return self.seconds["draft"] + self.seconds["plan"]


class Took(NamedTuple):
    """What a step took. rows: of its pass. speculating: of its seconds, those of drafting and of
    the decisions about it. predicted: what the plan said of the others; 0: nothing."""

    rows: int
    seconds: float
    speculating: float
    predicted: float = 0.0


@dataclass(slots=True)
class Batch:
    """The requests of a pass. `rows_left` rows of the budget are free for drafts."""

    rows_left: int
    turns: list[Turn] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    predicted_seconds: float = 0.0  # of the step without `speculating`; 0: no prediction
    rests: bool = False  # nobody is asked, and there is nothing to decide

    def take(self, request: Request) -> None:
        """Give a request the rows of its pending tokens, as far as there are any left."""
        pending = len(request.tokens) - request.cached
        rows = min(pending, self.rows_left)
        if rows:
            self.turns.append(Turn(request, rows, rows == pending, pending == 1))
            self.rows_left -= rows

    @property
    def deciding(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.decides]

    @property
    def asked(self) -> list[Turn]:
        """Those for whom the drafter was asked."""
        return [turn for turn in self.turns if turn.budget]


class Scheduler:
    """Queues requests and reserves their slots."""

    def __init__(self, store: KVStore, max_num_seqs: int, max_batch_rows: int) -> None:
        if not 1 <= max_num_seqs <= max_batch_rows:
            raise ConfigError(
                f"max_batch_rows {max_batch_rows} cannot hold max_num_seqs {max_num_seqs} "
                "sequences; every one needs a row, and there must be at least one"
            )
        self.store = store
        self.max_num_seqs = max_num_seqs
        self.max_batch_rows = max_batch_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._full = False  # someone was preempted: whoever is admitted now would be next

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request has ended: its slots are free."""
        if request.span is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._release(request)
        self._full = False

    def schedule(self) -> Batch:
        """Choose the rows of the next pass; there is room for them in the store."""
        batch = Batch(self.max_batch_rows)
        prompts = []
        for request in self.running[:]:
            if request.span is None:  # preempted by an older one
                continue
            if len(request.tokens) - request.cached > 1:
                prompts.append(request)  # its slots were reserved when it was admitted
            elif self._make_room(request, batch.preempted):
                batch.take(request)
        for request in prompts:
            if request.span:
                batch.take(request)
        while batch.rows_left and self._admit():
            batch.take(self.running[-1])
        return batch

    def _admit(self) -> bool:
        """Move the first of the queue to the running ones if there is room for all its tokens."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        if self._full and self.running:
            return False
        request = self.waiting[0]
        span = self.store.open()
        try:
            self.store.reserve(span, len(request.tokens))
        except CapacityError:
            return False
        request.span = span
        self.running.append(self.waiting.popleft())
        return True

    def _make_room(self, request: Request, preempted: list[Request]) -> bool:
        """Reserve a row, at the cost of the youngest; False if that was `request` itself."""
        assert request.span
        while True:
            try:
                self.store.reserve(request.span, 1)
                return True
            except CapacityError:
                youngest = self.running.pop()
                self._release(youngest)
                self.waiting.appendleft(youngest)
                preempted.append(youngest)
                self._full = True
                if youngest is request:
                    return False

    def _release(self, request: Request) -> None:
        assert request.span
        self.store.release(request.span)
        request.span = None
