"""Rounds of drafters that count, each in one compiled call (kernels/counting.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from forerun.core import Draft, Request
from forerun.drafters.calibration import Calibration
from forerun.drafters.corpus_file import Corpus
from forerun.drafters.sources import COUNTS, Source
from forerun.drafters.tree import prune
from forerun.models import kernels
from forerun.models.heads.rounds import Rounds


class _Tables(ctypes.Structure):
    """A corpus; mirror of `Corpus` in kernels/counting.h."""

    _fields_ = (
        ("keys_at", ctypes.c_void_p),
        ("begins_at", ctypes.c_void_p),
        ("followers_at", ctypes.c_void_p),
        ("chances_at", ctypes.c_void_p),
        ("contexts", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("most", ctypes.c_int32),
    )

    @classmethod
    def of(cls, corpus: Corpus) -> _Tables:
        tables = corpus.tables
        arrays = (tables.keys_C, tables.begins_C1, tables.followers_E, tables.chances_E)
        found = cls(
            *(each.ctypes.data for each in arrays),
            corpus.contexts,
            corpus.order,
            tables.followers_E.dtype == np.uint32,
            int(np.diff(tables.begins_C1).max()),
        )
        found.tables = tables  # keeps alive what the addresses point to
        return found


class Counting(ctypes.Structure):
    """How a drafter counts; mirror of `Counting` in kernels/counting.h.

    order: longest ending that is looked for in the request. weight: sightings that one there counts
    for. negligible: probability left over at which shorter endings no longer matter. floor: paths
    that are less likely are not proposed. The rest is for a corpus, see `drafters/corpus.py`.
    """

    floor: float
    _fields_ = (
        ("corpus_at", ctypes.c_void_p),
        ("order", ctypes.c_int32),
        ("weight", ctypes.c_double),
        ("negligible", ctypes.c_double),
        ("equal_trust", ctypes.c_double),
        ("floor", ctypes.c_double),
        ("noiseless", ctypes.c_double),
        ("coupling", ctypes.c_double),
        ("unknown_noise", ctypes.c_double),
    )

    def __init__(
        self,
        *,
        order: int,
        weight: float,
        negligible: float,
        floor: float,
        corpus: Corpus | None = None,
        equal_trust: float = 0.0,
        noiseless: float = 0.0,
        coupling: float = 0.0,
        unknown_noise: float = 0.0,
    ) -> None:
        self._tables = _Tables.of(corpus) if corpus else None
        super().__init__(
            ctypes.addressof(self._tables) if self._tables else None,
            order,
            weight,
            negligible,
            equal_trust,
            floor,
            noiseless,
            coupling,
            unknown_noise,
        )


class _Text(ctypes.Structure):
    """A request; mirror of `Text` in kernels/counting.h."""

    depth: int

    _fields_ = (
        ("tokens_at", ctypes.c_void_p),
        ("length", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("coupled", ctypes.c_int32),
    )

    def __init__(self, coupled: bool) -> None:
        super().__init__(coupled=coupled)
        self._tokens = array("q")
        self.address = ctypes.addressof(self)

    def update(self, request: Request, depth: int) -> None:
        """Read what came since the last call. depth: of the longest path."""
        self._tokens.extend(request.tokens[len(self._tokens) :])
        self.tokens_at, self.length = self._tokens.buffer_info()
        self.depth = min(depth, request.remaining - 1)


class CountingRounds(Rounds):
    """The tokens of each request, and trees of what may follow them.

    nodes, depth: most tokens of a tree, and of a path. couples: whether the noise with which a
    request samples is taken into account.
    """

    @classmethod
    def make(
        cls, counting: Counting, nodes: int, depth: int, couples: bool = False
    ) -> CountingRounds | None:
        """None where there are no compiled kernels."""
        lib = kernels.library()
        return cls(lib, counting, nodes, depth, couples) if lib else None

    def __init__(
        self, lib: ctypes.CDLL, counting: Counting, nodes: int, depth: int, couples: bool
    ) -> None:
        super().__init__(lib)
        self._counting = counting
        self._nodes, self._depth, self._couples = nodes, depth, couples
        self._texts: dict[int, _Text] = {}

    def propose(
        self, requests: Sequence[Request], budgets: Sequence[int], calibration: Calibration
    ) -> list[Draft]:
        """The most probable paths of each, as `best_first` and `Calibration.correct` make them."""
        rules = calibration.rules(1, self._nodes)
        trees = [
            calibration.tree(request, min(budget, self._nodes), rules)
            for request, budget in zip(requests, budgets, strict=True)
        ]
        texts = array("Q", [self._text(request).address for request in requests])
        start = texts.buffer_info()[0]
        self._run(self._lib.counting_round, self._counting, rules, trees, start)
        drafts = []
        for request, tree in zip(requests, trees, strict=True):
            draft = calibration.grown(request, tree) if tree.count else Draft()
            floor = self._counting.floor
            kept = [node for node, chance in enumerate(draft.survival) if chance >= floor]
            drafts.append(prune(draft, kept))
        return drafts

    def source(self, request: Request) -> Source:
        """Its law, to be joined with others."""
        text = self._text(request)
        return Source(
            COUNTS,
            nodes=self._nodes,
            depth=text.depth,
            floor=self._counting.floor,
            net_at=ctypes.addressof(self._counting),
            text_at=text.address,
        )

    def release(self, request: Request) -> None:
        """Forget its tokens."""
        self._texts.pop(request.id, None)

    def _text(self, request: Request) -> _Text:
        text = self._texts.get(request.id)
        if text is None:
            coupled = self._couples and not request.params.greedy
            text = self._texts[request.id] = _Text(coupled)
        text.update(request, self._depth)
        return text
