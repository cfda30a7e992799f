"""What a pass of the target costs, by its rows and by the tokens that they attend to."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch

from forerun.models.cache import MIN_SPAN, KVStore, Span
from forerun.models.target import Segment, Target

# Of one sequence without a prefix; the most telling first. Kernels walk over eight rows at a time.
ROWS = (1, 8, 32, 2, 16, 9, 6, 4, 12, 64)
CONTEXT = 1024  # tokens of prefix, in all sequences of a pass together
SEQUENCES = 8
REPEATS = 8  # the fastest counts: other work on the machine only ever adds
SECONDS = 1.5  # after which nothing further is measured, however slow the target
FAR = 2**20  # rows, up to which the last straight line goes on
RATE = 1 / 8  # weight of one step in the correction, of all costs and of those for as many rows
NEAR = 0.5  # share of such a correction that the next number of rows measured has, and so on
BENT = 2.0  # times, or parts, by which costs for some rows may be corrected beyond all others
MOST = 0.25  # relative correction by one step, so that an interruption counts for little


@dataclass(frozen=True, slots=True)
class Load:
    """A pass: so many sequences, each with so many rows behind so many tokens of prefix."""

    sequences: int
    rows: int
    prefix: int = 0


class Costs:
    """Seconds of a pass.

        curve[rows] + sequence * (sequences - 1) + key * keys + row_key * (keys summed over rows)

    points: rows -> seconds of one sequence without a prefix; straight lines between them and on
        from the last, never falling.
    sequence: for each further sequence. key: for each token of prefix, whatever the number of rows
        behind it (its keys and values are read). row_key: for each token of prefix and row.
    learns: whether `correct` may scale all of this; costs that were made up stay as they are.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        sequence: float = 0.0,
        key: float = 0.0,
        row_key: float = 0.0,
        learns: bool = False,
    ) -> None:
        rows = sorted(points)
        # More rows are never cheaper: where it looks so, other work came upon fewer of them.
        seconds = list(accumulate((points[each] for each in reversed(rows)), min))[::-1]
        slope = 0.0
        if len(rows) > 1:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        self._places, self._measured = (
            [*rows, FAR],
            [*seconds, seconds[-1] + slope * (FAR - rows[-1])],
        )
        self._bends = [1.0] * len(self._places)
        self._seconds = self._measured
        # As worked out last, by the first rows.
        self._curves: dict[int, list[float]] = {}
        self._flattest: dict[int, float] = {}
        self.sequence, self.key, self.row_key = sequence, key, row_key
        self.factor = 1.0
        self._learns = learns

    def __getitem__(self, rows: int) -> float:
        """Seconds of so many rows of one sequence without a prefix."""
        return self.factor * self.curve(rows, rows)[0]

    def _between(self, rows: int) -> tuple[int, float]:
        """The index of the first place with more rows, and how near to it these are, from 0 at the
        place before it to 1."""
        places = self._places
        right = min(max(1, bisect_right(places, rows)), len(places) - 1)
        fewer, more = places[right - 1 : right + 1]
        return right, max(0, rows - fewer) / (more - fewer)

    def curve(self, first: int, last: int) -> list[float]:
        """The same before it is multiplied by `factor`, for all rows from `first` on, to `last` at
        least."""
        curve = self._curves.get(first, [])
        if len(curve) > last - first:
            return curve
        curve = self._curves[first] = []
        begin = first
        while begin <= last:
            right, _ = self._between(begin)
            place, fewer = self._places[right - 1], self._seconds[right - 1]
            slope = (self._seconds[right] - fewer) / (self._places[right] - place)
            end = min(last + 1, self._places[right])
            curve += [fewer + slope * max(0, rows - place) for rows in range(begin, end)]
            begin = end
        return curve

    def least(self, rows: int) -> float:
        """Seconds that a row costs at least, where there are `rows` already."""
        flattest = self._flattest.get(rows)
        if flattest is None:
            flattest = self._flattest[rows] = self._slope_from(rows)
        return self.factor * flattest

    def _slope_from(self, rows: int) -> float:
        places, seconds = self._places, self._seconds
        if rows < places[0]:
            return 0.0
        begin = bisect_right(places, rows) - 1
        return min(
            (seconds[i + 1] - seconds[i]) / (places[i + 1] - places[i])
            for i in range(begin, len(places) - 1)
        )

    def further(self, rows: int, prefix: int, of: int) -> float:
        """Seconds that `of` the rows of a pass took, those of one sequence behind this prefix."""
        return self[rows] - self[rows - of] + self.factor * self.row_key * prefix * of

    def seconds(self, prefixes: Sequence[int], rows: Sequence[int]) -> float:
        """Seconds of a pass over sequences with these prefixes, each with so many rows."""
        row_keys: int = sum(map(mul, prefixes, rows))
        beside = self.sequence * (len(rows) - 1) + self.key * sum(prefixes)
        return self[sum(rows)] + self.factor * (beside + self.row_key * row_keys)

    def plain(self, prefixes: Sequence[int]) -> float:
        """Seconds of a pass over one row of each sequence."""
        return self.seconds(prefixes, [1] * len(prefixes))

    def correct(self, rows: int, predicted: float, measured: float) -> None:
        """Learn from a step with so many rows. The engine's own work for a step comes in here, too.

        All costs move towards what it took, those for about as many rows further than the others,
        the further the nearer they are: whether a row is nearly free depends on how fast memory is,
        which other programs change, and passes of one or eight rows wait for it alike.
        """
        if not self._learns:
            return
        step = 1 + RATE * min(MOST, max(-MOST, measured / predicted - 1))
        self.factor *= step
        right, share = self._between(rows)
        place = right - 1 + share
        self._bends = [
            min(BENT, max(1 / BENT, bend * step ** (NEAR ** abs(i - place))))
            for i, bend in enumerate(self._bends)
        ]
        self._bends[-1] = self._bends[-2]
        self._seconds = list(accumulate(map(mul, self._measured, self._bends), max))
        self._curves.clear()
        self._flattest.clear()


def loads(slots: int) -> list[Load]:
    """What to measure where there are so many free slots."""
    prefix = min(CONTEXT, slots // 2)
    wanted = [
        *(Load(1, rows) for rows in ROWS),
        Load(1, 1, prefix),
        Load(1, SEQUENCES, prefix),
        Load(SEQUENCES, 1, prefix // SEQUENCES),
    ]
    return list(dict.fromkeys(load for load in wanted if _room(load) <= slots))


def _room(load: Load) -> int:
    """Slots that it takes; spans that are not alone reserve more than they need."""
    needed = load.rows + load.prefix
    return needed if load.sequences == 1 else load.sequences * max(MIN_SPAN, 2 * needed)


@torch.inference_mode()
def sample(
    target: Target, store: KVStore, loads: Sequence[Load], limit: float = SECONDS
) -> dict[Load, float]:
    """Seconds of each load: the fastest of several passes, taken in turns. No round of passes is
    begun, and none but the first two are made, after `limit` seconds."""
    found: dict[Load, float] = {}
    begin = time.perf_counter()
    for repeat in range(1 + REPEATS):  # the first round warms up
        for place, load in enumerate(loads):
            if time.perf_counter() - begin > limit and (repeat or place > 1):
                return found
            seconds = _time(target, store, load)
            found[load] = min(seconds, found.get(load, seconds))
    return found


def fit(seconds: Mapping[Load, float]) -> Costs:
    """The costs that explain the measurements; what was not measured costs nothing."""
    points = {load.rows: taken for load, taken in seconds.items() if not load.prefix}
    costs = Costs(points, learns=True)
    over = {load: taken - costs[load.sequences * load.rows] for load, taken in seconds.items()}
    one = [load for load in seconds if load.sequences == 1 and load.prefix]
    if len(one) == 2:
        few, many = sorted(one, key=lambda load: load.rows)
        slope = (over[many] - over[few]) / (many.rows - few.rows) / few.prefix
        costs.row_key = min(max(0.0, slope), max(0.0, over[few]) / few.prefix)
        costs.key = max(0.0, over[few] / few.prefix - costs.row_key)
    for load in seconds:
        if load.sequences > 1:
            prefixes = (costs.key + costs.row_key) * load.sequences * load.prefix
            costs.sequence = max(0.0, (over[load] - prefixes) / (load.sequences - 1))
    return costs


def _time(target: Target, store: KVStore, load: Load) -> float:
    spans = [_blank(store, load) for _ in range(load.sequences)]
    segments = [Segment(span, [0] * load.rows) for span in spans]
    try:
        begin = time.perf_counter()
        logits_NV = target.forward(segments, store).logits_NV
        logits_NV[-1:].argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - begin
    finally:
        for span in spans:
            store.release(span)


def _blank(store: KVStore, load: Load) -> Span:
    """A span with a prefix of zeros. They are written: memory that never was takes no time to
    read."""
    span = store.open()
    store.reserve(span, load.prefix + load.rows)
    if load.prefix:
        store.kv[:, :, :, span.base : span.base + load.prefix] = 0
        store.extend(span, load.prefix)
    return span
