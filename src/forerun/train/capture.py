"""What drafts are trained on: a target's hidden states over texts, computed when they are needed.

B sequences, R rows (tokens), T taps, L boundaries (taps and the last), C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.cache import MIN_SPAN, KVStore
from forerun.models.target import OpenTarget, Segment, TargetInfo

if TYPE_CHECKING:
    from forerun.train.examples import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded at their ends with zeros that are supervised nowhere.

    supervised_BR: tokens that the assistant wrote.
    taps_BRTC: hidden states at the tapped boundaries (see `Forward.taps_RTD`).
    final_BRC: states behind the final norm: `head_logits` of row r is the target's law of token
        r + 1.
    """

    tokens_BR: Tensor
    supervised_BR: Tensor
    lengths_B: Tensor
    taps_BRTC: Tensor
    final_BRC: Tensor


class States:
    """The hidden states of texts that have been run before, in a file. L boundaries, N tokens.

    The file has room for all texts; what is not written yet takes no space on most disks.
    """

    def __init__(
        self, file: Path, examples: Sequence[Example], boundaries: int, info: TargetInfo
    ) -> None:
        self._places: dict[int, int] = {}  # first token of each text, by its identity
        end = 0
        for example in examples:
            self._places[id(example)] = end
            end += len(example.tokens)
        file.parent.mkdir(parents=True, exist_ok=True)
        size = end * boundaries * info.hidden_size
        flat = torch.from_file(str(file), shared=True, size=size, dtype=info.dtype)
        self._states_NLC = flat.view(end, boundaries, info.hidden_size)
        self._known: set[int] = set()

    @staticmethod
    def bytes(examples: Sequence[Example], boundaries: int, info: TargetInfo) -> int:
        """What a file for these texts takes."""
        tokens = sum(len(example.tokens) for example in examples)
        return tokens * boundaries * info.hidden_size * info.dtype.itemsize

    def __contains__(self, example: Example) -> bool:
        return id(example) in self._known

    def read(self, example: Example) -> Tensor:
        """[N, L, C]."""
        begin = self._places[id(example)]
        return self._states_NLC[begin : begin + len(example.tokens)]

    def write(self, example: Example, states_NLC: Tensor) -> None:
        """Texts that have no place in the file are not kept."""
        if id(example) in self._places:
            self.read(example).copy_(states_NLC)
            self._known.add(id(example))


class Capture:
    """Runs a target over texts, all in one packed pass. taps: boundaries to keep.

    states: where those of texts that have been run are kept and found.
    """

    def __init__(
        self, target: OpenTarget, taps: Sequence[int], states: States | None = None
    ) -> None:
        self._target = target
        self._boundaries = (*taps, target.info.layers)
        self._states = states
        self._store: KVStore | None = None

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """The texts as tensors on the target's device; no gradient leads back into the target."""
        info = self._target.info
        lengths = [len(example.tokens) for example in examples]
        shape = (len(examples), max(lengths))
        tokens_BR = torch.zeros(shape, dtype=torch.int64)
        supervised_BR = torch.zeros(shape, dtype=torch.bool)
        # Ordinary tensors, which autograd may keep: those of the pass are inference tensors.
        states_BRLC = torch.zeros(
            *shape, len(self._boundaries), info.hidden_size, dtype=info.dtype, device=info.device
        )
        found = self._find(examples)
        for b, (example, states_NLC) in enumerate(zip(examples, found, strict=True)):
            tokens_BR[b, : lengths[b]] = torch.tensor(example.tokens)
            supervised_BR[b, : lengths[b]] = torch.tensor(example.supervised)
            states_BRLC[b, : lengths[b]] = states_NLC
        return Batch(
            tokens_BR.to(info.device),
            supervised_BR.to(info.device),
            torch.tensor(lengths, device=info.device),
            states_BRLC[:, :, :-1],
            self._target.final_norm(states_BRLC[:, :, -1].flatten(0, 1)).unflatten(0, shape),
        )

    def _find(self, examples: Sequence[Example]) -> Iterator[Tensor]:
        kept = self._states
        if kept is None:
            yield from self._run(examples)
            return
        if new := [example for example in examples if example not in kept]:
            for example, states_NLC in zip(new, self._run(new), strict=True):
                kept.write(example, states_NLC)
        for example in examples:
            yield kept.read(example)

    def _run(self, examples: Sequence[Example]) -> Sequence[Tensor]:
        lengths = [len(example.tokens) for example in examples]
        store = self._room(2 * sum(lengths) + MIN_SPAN * len(examples))
        spans = [store.open() for _ in examples]
        segments = []
        for span, example in zip(spans, examples, strict=True):
            store.reserve(span, len(example.tokens))
            segments.append(Segment(span, example.tokens, logits_from=len(example.tokens)))
        states_NLC = self._target.forward(segments, store, self._boundaries).taps_RTD
        for span in spans:
            store.release(span)
        assert states_NLC is not None
        parts: Sequence[Tensor] = states_NLC.split(lengths)
        return parts

    def _room(self, slots: int) -> KVStore:
        """Spans take more than they ask for."""
        if self._store is None or self._store.slots < slots:
            self._store = self._target.new_store(slots)
        return self._store
