"""What drafts are trained on: a target's hidden states over texts, computed when they are needed.

B sequences, R rows (tokens), T taps, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.cache import MIN_SPAN, KVStore
from forerun.models.target import OpenTarget, Segment

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


class Capture:
    """Runs a target over texts, all in one packed pass. taps: boundaries to keep."""

    def __init__(self, target: OpenTarget, taps: Sequence[int]) -> None:
        self._target = target
        self._boundaries = (*taps, target.info.layers)
        self._store: KVStore | None = None

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """The texts as tensors on the target's device; no gradient leads back into the target."""
        info = self._target.info
        lengths = [len(example.tokens) for example in examples]
        hidden_NTC = self._run(examples, sum(lengths))
        shape = (len(examples), max(lengths))
        tokens_BR = torch.zeros(shape, dtype=torch.int64)
        supervised_BR = torch.zeros(shape, dtype=torch.bool)
        # Ordinary tensors, which autograd may keep: those of the pass are inference tensors.
        states_BRTC = torch.zeros(
            *shape, *hidden_NTC.shape[1:], dtype=info.dtype, device=info.device
        )
        parts = hidden_NTC.split(lengths)
        for b, (example, part) in enumerate(zip(examples, parts, strict=True)):
            tokens_BR[b, : lengths[b]] = torch.tensor(example.tokens)
            supervised_BR[b, : lengths[b]] = torch.tensor(example.supervised)
            states_BRTC[b, : lengths[b]] = part
        return Batch(
            tokens_BR.to(info.device),
            supervised_BR.to(info.device),
            torch.tensor(lengths, device=info.device),
            states_BRTC[:, :, :-1],
            self._target.final_norm(states_BRTC[:, :, -1]),
        )

    def _run(self, examples: Sequence[Example], rows: int) -> Tensor:
        store = self._room(2 * rows + MIN_SPAN * len(examples))
        spans = [store.open() for _ in examples]
        segments = []
        for span, example in zip(spans, examples, strict=True):
            store.reserve(span, len(example.tokens))
            segments.append(Segment(span, example.tokens, logits_from=len(example.tokens)))
        hidden_NTC = self._target.forward(segments, store, self._boundaries).taps_RTD
        for span in spans:
            store.release(span)
        assert hidden_NTC is not None
        return hidden_NTC

    def _room(self, slots: int) -> KVStore:
        """Spans take more than they ask for."""
        if self._store is None or self._store.slots < slots:
            self._store = self._target.new_store(slots)
        return self._store
