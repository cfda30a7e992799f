"""Rows of many texts side by side, and what they see while drafting is unrolled over them.

B sequences, N rows, M rows that draft, K keys, S own keys; H heads, G kv heads with g queries each,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.train.capture import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the sequences of a batch, in order. counts: how many of each sequence."""

    sequence_N: Tensor
    row_N: Tensor
    counts: Sequence[int]

    def __len__(self) -> int:
        return len(self.row_N)

    def tokens(self, batch: Batch, ahead: int) -> Tensor:
        """The tokens `ahead` places behind the rows, [N]; anything where the sequence is over."""
        last = batch.tokens_BR.shape[1] - 1
        return batch.tokens_BR[self.sequence_N, (self.row_N + ahead).clamp(max=last)]

    def run_on(self, steps: int) -> Tensor:
        """Whether the rows 1 ... `steps` places above, too, are here, bool [N]."""
        known_N = torch.ones_like(self.row_N, dtype=torch.bool)
        if steps:
            known_N[:steps] = False
            same_N = self.sequence_N[steps:] == self.sequence_N[:-steps]
            known_N[steps:] = same_N & (self.row_N[steps:] - self.row_N[:-steps] == steps)
        return known_N


@dataclass(frozen=True, slots=True)
class Plan:
    """anchors: rows t that draft, because the assistant wrote the tokens t + 1 and t + 2. context:
    the rows that these see, all from the first on. place_M: where the anchors stand in it."""

    context: Rows
    anchors: Rows
    place_M: Tensor

    @staticmethod
    def of(supervised_BR: Tensor) -> Plan:
        device = supervised_BR.device
        drafts_BR = supervised_BR[:, 1:-1] & supervised_BR[:, 2:]
        sequence_M, row_M = drafts_BR.nonzero(as_tuple=True)
        rows = [drafts_R.nonzero()[:, 0].tolist() for drafts_R in drafts_BR.cpu()]
        counts = [found[-1] + 1 if found else 0 for found in rows]
        sequence_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        row_N = torch.cat([torch.arange(count) for count in counts])
        begins_B = torch.tensor([0, *counts[:-1]], device=device).cumsum(0)
        return Plan(
            Rows(sequence_N.to(device), row_N.to(device), counts),
            Rows(sequence_M, row_M, [len(found) for found in rows]),
            begins_B[sequence_M] + row_M,
        )


@dataclass(slots=True)
class _Layer:
    """What a layer remembers of each sequence: keys and values [G, K, D] of step 0, and those of
    the anchors [G, M, D] of each later step."""

    context: list[tuple[Tensor, Tensor]]
    own: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)


class Unrolled:
    """A `Memory` of the steps: step 0 runs the context rows, every later one the anchors.

    A row sees the rows of step 0 up to its own, and its own of the later steps. Those are one key
    each, so their scores are elementwise products; no mask over all rows is ever built of them.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._layers: dict[int, _Layer] = {}
        device = plan.place_M.device
        parts = plan.anchors.row_N.split(list(plan.anchors.counts))
        whole = [torch.arange(count, device=device) for count in plan.context.counts]
        self._first = [_behind(rows, len(rows)) for rows in whole]
        self._later = [_behind(part, len(rows)) for part, rows in zip(parts, whole, strict=True)]

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """See `Memory.attend`; the one sequence of the pass holds the rows of all."""
        assert len(q_BHRD) == 1, "rows lie side by side"
        known = self._layers.get(layer)
        counts = list((self._plan.anchors if known else self._plan.context).counts)
        queries = q_BHRD[0].split(counts, 1)
        pairs = list(
            zip(keys_BGRD[0].split(counts, 1), values_BGRD[0].split(counts, 1), strict=True)
        )
        if known is None:
            known = self._layers[layer] = _Layer(pairs)
        else:
            known.own.append(pairs)
        hidden = self._later if known.own else self._first
        found = [
            _attend(q_HND, *known.context[b], hidden[b], [step[b] for step in known.own])
            for b, q_HND in enumerate(queries)
            if q_HND.shape[1]
        ]
        return torch.cat(found, 1)[None]


def _behind(rows_N: Tensor, keys: int) -> Tensor:
    """The keys that stand behind a row, bool [N, K]."""
    return torch.arange(keys, device=rows_N.device) > rows_N[:, None]


def _attend(
    q_HND: Tensor,
    keys_GKD: Tensor,
    values_GKD: Tensor,
    hidden_NK: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """One softmax over the keys that all rows share and those that each has for itself."""
    groups, rows = len(keys_GKD), q_HND.shape[1]
    q_GMD = (q_HND * q_HND.shape[-1] ** -0.5).unflatten(0, (groups, -1)).flatten(1, 2)
    scores_GMK = q_GMD @ keys_GKD.transpose(1, 2)
    shared_GgNK = scores_GMK.float().unflatten(1, (-1, rows)).masked_fill(hidden_NK, -torch.inf)
    q_GgND = q_GMD.unflatten(1, (-1, rows))
    alone = [(q_GgND * k_GND[:, None]).sum(-1, dtype=torch.float32)[..., None] for k_GND, _ in own]
    law_GgNX = torch.cat([shared_GgNK, *alone], -1).softmax(-1).to(q_HND.dtype)
    found_GMD: Tensor = law_GgNX[..., : keys_GKD.shape[1]].flatten(1, 2) @ values_GKD
    found_GgND = found_GMD.unflatten(1, (-1, rows))
    for s, (_, values_GND) in enumerate(own, keys_GKD.shape[1]):
        found_GgND = found_GgND + law_GgNX[..., s, None] * values_GND[:, None]
    found_HND: Tensor = found_GgND.flatten(0, 1)
    return found_HND
