"""What the engine asks of a model: one pass over the rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.cache import KVStore, Span

if TYPE_CHECKING:
    from forerun.models.layers import Backend, Matrix


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a pass; they are written to the slots behind `span.length`.

    parents: per row, the index of the row in this segment that it follows; -1: it follows the
        committed prefix. None: a chain. Parents stand before children.
    logits_from: rows from this index on get logits; len(tokens): none do.
    """

    span: Span
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logits_from: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """What a pass gives back.

    logits_NV: float32 logits of the rows that asked for them, segment after segment.
    taps_RTD: hidden states of all rows at the T tapped boundaries; None if none was asked for.
        Boundary 0 is the embedding, boundary i the output of layer i - 1 (so the input of layer i),
        boundary `layers` the output of the last layer, before the final norm.
    """

    logits_NV: Tensor
    taps_RTD: Tensor | None


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What is known of a loaded model."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_length: int  # positions it was made for
    dtype: torch.dtype
    device: torch.device
    row_invariant: bool  # chains and any batch give bitwise the logits of single steps
    tree_invariant: bool  # trees do, too
    rope_base: float | None = None  # of its rotary positions; None: not known, or it has none


class Target(Protocol):
    """A causal language model over packed rows. A pass changes nothing but slots of the store."""

    info: TargetInfo

    def new_store(self, slots: int) -> KVStore:
        """An empty key/value store for `slots` tokens."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        store: KVStore,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> Forward:
        """Run all rows of all segments in one pass.

        Room must have been reserved. Nothing is committed: that is `store.commit`.
        layers: run only these (ascending); None runs all.
        """
        ...


@runtime_checkable
class OpenTarget(Target, Protocol):
    """A target that lends its two ends to drafters built on its hidden states. C hidden size.

    backend: what computes its layers, and can compute what else reads states of their size.
    embedding_VC: what `embed` looks up, not scaled. final_norm_C, head: what `final_norm` and
    `head_logits` compute with, as the backend lays it out.
    """

    backend: Backend
    embedding_VC: Tensor
    final_norm_C: Tensor
    head: Matrix

    def embed(self, tokens_N: Tensor, scaled: bool = True) -> Tensor:
        """What the first layer is fed, [N, C]; without the embedding scale if not `scaled`."""
        ...

    def final_norm(self, hidden_NC: Tensor) -> Tensor:
        """From the output of the last layer (boundary `layers`) to what the head reads."""
        ...

    def head_logits(self, normed_NC: Tensor) -> Tensor:
        """float32 logits [N, V] of states behind the final norm."""
        ...


def opened(target: Target, drafter: str) -> OpenTarget:
    """The same target; raises `ConfigError` if it does not lend what `drafter` builds on."""
    if not isinstance(target, OpenTarget):
        raise ConfigError(
            f"the {drafter} draft reads inside the model, which {target.info.name} does not allow "
            "because it runs through transformers; choose ngram or suffix"
        )
    return target
