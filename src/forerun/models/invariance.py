"""Does a row of a pass depend on the other rows? Measured at load, on the model itself.

Greedy ties flip, and sampled tokens with them, when the same row gives other bits in another
company. The check runs the first two layers and the head over a few dozen rows: milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.models.cache import KVStore
from forerun.models.target import Segment

if TYPE_CHECKING:
    from forerun.models.decoder import Decoder

ROWS = 24
LONG = 200  # rows of a pass that is large enough for the kernels of prompts
MULTIPLES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Invariance:
    """row_multiple: pad the rows of every pass to a multiple of it.

    rows: chains and batches give bitwise the logits of single steps. trees: trees do, too.
    """

    row_multiple: int
    rows: bool
    trees: bool


def measure(decoder: Decoder) -> Invariance:
    """The smallest padding with which rows are independent, if any is."""
    for multiple in MULTIPLES:
        decoder.row_multiple = multiple
        if _chains_agree(decoder):
            return Invariance(multiple, rows=True, trees=_trees_agree(decoder))
    return Invariance(1, rows=False, trees=False)


def check_finite(logits_NV: Tensor, name: str) -> None:
    """Raises `CheckpointError` when logits that a model gave are not numbers."""
    if not logits_NV.isfinite().all():
        raise CheckpointError(
            f"the logits of {name} are not finite; fetch its weights and config again (or, if it "
            "is run in float16, use another dtype)"
        )


def short_pass(decoder: Decoder) -> Tensor:
    """Logits behind all layers: damage may lie in any."""
    store = decoder.new_store(64)
    span = store.open()
    store.reserve(span, 2)
    return decoder.forward([Segment(span, _tokens(decoder, 2))], store).logits_NV


def _tokens(decoder: Decoder, count: int) -> list[int]:
    return [(7919 * i + 13) % decoder.config.vocab_size for i in range(count)]


def _run(decoder: Decoder, store: KVStore, segments: list[Segment]) -> Tensor:
    layers = range(min(2, decoder.config.layers))
    for segment in segments:
        store.reserve(segment.span, len(segment.tokens))
    return decoder.forward(segments, store, layers=layers).logits_NV


def _chain(decoder: Decoder, tokens: list[int], chunks: list[int]) -> Tensor:
    """Logits of all tokens, fed in chunks of the given sizes."""
    store = decoder.new_store(2 * len(tokens) + 64)
    span = store.open()
    parts = []
    for size in chunks:
        part = tokens[span.length : span.length + size]
        parts.append(_run(decoder, store, [Segment(span, part)]))
        store.extend(span, len(part))
    return torch.cat(parts)


def _chains_agree(decoder: Decoder) -> bool:
    tokens = _tokens(decoder, LONG)
    single = _chain(decoder, tokens[:ROWS], [1] * ROWS)
    if not torch.equal(single, _chain(decoder, tokens[:ROWS], [3, 5, 1, 7, 8])):
        return False
    store = decoder.new_store(2 * LONG + ROWS + 256)
    long, short = store.open(), store.open()
    store.reserve(long, LONG)
    both = _run(decoder, store, [Segment(long, tokens), Segment(short, tokens[:ROWS])])
    return torch.equal(single, both[:ROWS]) and torch.equal(single, both[LONG:])


def _trees_agree(decoder: Decoder) -> bool:
    """A tree of two branches behind a prefix against both branches as chains."""
    tokens = _tokens(decoder, ROWS)
    prefix, first, second = tokens[:10], tokens[10:17], tokens[17:24]
    store = decoder.new_store(ROWS + 128)
    span = store.open()
    _run(decoder, store, [Segment(span, prefix)])
    store.extend(span, len(prefix))
    parents = [-1, *range(len(first) - 1), -1, *range(len(first), ROWS - len(prefix) - 1)]
    tree = _run(decoder, store, [Segment(span, first + second, parents)])
    chains = [
        _chain(decoder, prefix + branch, [1] * (len(prefix) + len(branch)))[len(prefix) :]
        for branch in (first, second)
    ]
    return torch.equal(tree, torch.cat(chains))
