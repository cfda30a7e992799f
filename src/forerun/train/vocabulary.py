"""The tokens that a draft can propose: those that the target writes most often.

A small output matrix is most of what makes a draft fast. Tokens left out cost acceptance, never
correctness. U tokens of the draft, V of the target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.train.examples import Example


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """ids_U: the kept ids of the target, ascending. size: V. coverage: share of the counted tokens
    that is kept."""

    ids_U: Tensor
    size: int
    coverage: float = 1.0

    def __len__(self) -> int:
        return len(self.ids_U)

    @property
    def reduced(self) -> bool:
        return len(self.ids_U) < self.size

    @property
    def d2t_U(self) -> Tensor:
        """From draft ids to target ids, as published: the difference of the two."""
        return self.ids_U - torch.arange(len(self.ids_U), device=self.ids_U.device)

    def lookup(self) -> Tensor:
        """Draft id of every target id, -1 where it is left out, [V]."""
        known_V = torch.full((self.size,), -1, device=self.ids_U.device)
        known_V[self.ids_U] = torch.arange(len(self.ids_U), device=self.ids_U.device)
        return known_V


def full(size: int) -> Vocabulary:
    """All tokens of the target."""
    return Vocabulary(torch.arange(size), size)


def count(examples: Iterable[Example], size: int) -> Tensor:
    """How often each token was written by the assistant, int64 [V]."""
    counts_V = torch.zeros(size, dtype=torch.int64)
    for example in examples:
        written = torch.tensor(example.tokens)[torch.tensor(example.supervised, dtype=torch.bool)]
        counts_V += torch.bincount(written, minlength=size)
    return counts_V


def choose(counts_V: Tensor, size: int, always: Collection[int] = ()) -> Vocabulary:
    """The `size` most frequent tokens, `always` (ends of answers, marks of the chat) among them.

    Ties go to the lower id. Raises `ConfigError` where they do not fit.
    """
    known = len(counts_V)
    if size >= known:
        return full(known)
    if len(always) > size:
        raise ConfigError(
            f"a draft vocabulary of {size} has no room for the {len(always)} special tokens; "
            "ask for more"
        )
    ranked_V = counts_V.clone()
    ranked_V[sorted(always)] = counts_V.max() + 1
    kept_U = ranked_V.argsort(descending=True, stable=True)[:size].sort().values
    return given(kept_U, counts_V)


def given(ids_U: Tensor, counts_V: Tensor) -> Vocabulary:
    """These tokens, and how much of the counted ones they are."""
    total = max(int(counts_V.sum()), 1)
    return Vocabulary(ids_U, len(counts_V), int(counts_V[ids_U].sum()) / total)


def controls(special: Sequence[int | None], stop_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that are kept whatever their count."""
    return frozenset(token for token in special if token is not None) | frozenset(stop_ids)
