"""Joined trees in compiled calls (kernels/joined.c), and what is learned from them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forerun.core import Draft, Request
from forerun.drafters import mixing
from forerun.drafters.calibration import Calibration
from forerun.drafters.mixing import Mixer
from forerun.drafters.sources import Source
from forerun.models import kernels
from forerun.models.heads.rounds import Rounds

NODES = 128  # most of a tree
CANDIDATES = 4096  # that a tree looks at, at most
MOST_SOURCES = 6  # the patterns of what they say are 3 to the power of that


class _Weights(ctypes.Structure):
    """What a `Mixer` learns, for all patterns; mirror of `Mixer` in kernels/joined.c."""

    _fields_ = (
        ("mean_at", ctypes.c_void_p),
        ("variance_at", ctypes.c_void_p),
        ("sources", ctypes.c_int32),
        ("least", ctypes.c_double),
        ("largest", ctypes.c_double),
        ("prior", ctypes.c_double),
        ("drift", ctypes.c_double),
        ("negligible", ctypes.c_double),
    )

    def __init__(self, sources: int, negligible: float) -> None:
        mixer = Mixer(sources)
        self.mean = array("d")
        for pattern in range(3**sources):
            self.mean.extend(mixer[pattern].mean)
        self.variance = array("d", [mixing.PRIOR]) * len(self.mean)
        super().__init__(
            self.mean.buffer_info()[0],
            self.variance.buffer_info()[0],
            sources,
            mixing.LEAST,
            mixing.LARGEST,
            mixing.PRIOR,
            mixing.DRIFT,
            negligible,
        )
        self.address = ctypes.addressof(self)


class _Place(ctypes.Structure):
    """Mirror of `Place` in kernels/joined.c."""

    _fields_ = (
        ("node", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("reached", ctypes.c_double),
        ("total", ctypes.c_double),
    )


class _Candidate(ctypes.Structure):
    """Mirror of `Candidate` in kernels/joined.c."""

    _fields_ = (
        ("token", ctypes.c_int64),
        ("share", ctypes.c_double),
        ("pattern", ctypes.c_int32),
        ("behind", ctypes.c_int32),
    )


class _Lesson(ctypes.Structure):
    """All that a tree was mixed from; mirror of `Lesson` in kernels/joined.c.

    depth: of the longest path that is left to the request. length: of the text when the tree was
    grown; -1: there is none.
    """

    depth: int
    _fields_ = (
        ("places_room", ctypes.c_int32),
        ("candidates_room", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("places_at", ctypes.c_void_p),
        ("candidates_at", ctypes.c_void_p),
        ("inputs_at", ctypes.c_void_p),
        ("patterns_at", ctypes.c_void_p),
        ("places_count", ctypes.c_int32),
        ("candidates_count", ctypes.c_int32),
    )

    def __init__(self, sources: int) -> None:
        self.patterns = (ctypes.c_int32 * NODES)()
        self._places = (_Place * NODES)()
        self._candidates = (_Candidate * CANDIDATES)()
        self._inputs = (ctypes.c_double * (CANDIDATES * (sources + 1)))()
        super().__init__(
            NODES,
            CANDIDATES,
            0,
            ctypes.addressof(self._places),
            ctypes.addressof(self._candidates),
            ctypes.addressof(self._inputs),
            ctypes.addressof(self.patterns),
        )
        self.address = ctypes.addressof(self)
        self.length = -1


class JoinedRounds(Rounds):
    """Grows for each request one tree of what several sources believe, and learns how to mix them.

    negligible: a path that no source takes to be likelier is not looked at. names: of those who
    name a token, by pattern.
    """

    def __init__(
        self, lib: ctypes.CDLL, sources: int, negligible: float, names: Mapping[int, str]
    ) -> None:
        super().__init__(lib)
        self._sources, self._names = sources, names
        self._weights = {greedy: _Weights(sources, negligible) for greedy in (True, False)}
        self._lessons: dict[int, _Lesson] = {}

    @classmethod
    def make(cls, sources: int, negligible: float, names: Mapping[int, str]) -> JoinedRounds | None:
        """None where there are no compiled kernels, or too many sources."""
        lib = kernels.library()
        return cls(lib, sources, negligible, names) if lib and sources <= MOST_SOURCES else None

    def propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[int],
        sources: Sequence[Sequence[Source]],
        calibration: Calibration,
    ) -> list[Draft]:
        """One tree each. sources: of each request, in the order of the drafters."""
        rules = calibration.rules(1, NODES)
        trees = []
        for request, budget, own in zip(requests, budgets, sources, strict=True):
            nodes = min(budget, NODES, sum(source.nodes for source in own))
            trees.append(calibration.tree(request, max(0, nodes), rules))
        lessons = [self._lesson(request) for request in requests]
        flat = [source for own in sources for source in own]
        weights = [self._weights[request.params.greedy].address for request in requests]
        count = len(requests)
        self._run(
            self._lib.joined_round,
            (ctypes.c_void_p * count)(*weights),
            rules,
            trees,
            (Source * len(flat))(*flat),
            (ctypes.c_void_p * count)(*(lesson.address for lesson in lessons)),
        )
        drafts = []
        for request, tree, lesson in zip(requests, trees, lessons, strict=True):
            lesson.length = len(request.tokens)  # much can be learned where no path is likely, too
            if not tree.count:
                drafts.append(Draft())
                continue
            draft = calibration.grown(request, tree)
            named = [self._names[pattern] for pattern in lesson.patterns[: len(draft)]]
            drafts.append(replace(draft, sources=named))
        return drafts

    def learn(self, request: Request) -> None:
        """From what followed the last tree."""
        lesson = self._lessons.get(request.id)
        if lesson is None or lesson.length < 0:
            return
        truth = array("q", request.tokens[lesson.length :])
        weights = self._weights[request.params.greedy]
        self._lib.joined_learn(weights.address, lesson.address, truth.buffer_info()[0], len(truth))
        lesson.length = -1

    def release(self, request: Request) -> None:
        """Forget what a request was told."""
        self._lessons.pop(request.id, None)

    def _lesson(self, request: Request) -> _Lesson:
        lesson = self._lessons.get(request.id)
        if lesson is None:
            lesson = self._lessons[request.id] = _Lesson(self._sources)
        lesson.depth = request.remaining - 1
        return lesson
