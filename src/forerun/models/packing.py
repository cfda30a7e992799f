"""Rows of many sequences side by side in one pass.

slots of a segment   0 ....... length | length + 0, length + 1, ...
what they hold       committed        | nodes: rows of earlier passes, then those of this one
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.cache import Span
from forerun.models.target import Segment


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of a pass, segment after segment; arrays of int32.

    base_S, length_S: first slot and committed slots of each segment's span.
    first_S1, node_S1: first row and first node of each segment, and the number of all. The nodes of
    a segment lie in the slots behind its committed ones; the last of them are its rows.
    parent_N: per node, the node of its own segment that it follows; -1: the committed prefix.
    wanted: the rows that get logits.
    """

    tokens: list[int]
    base_S: array[int]
    length_S: array[int]
    first_S1: array[int]
    node_S1: array[int]
    parent_N: array[int]
    wanted: list[int]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> int:
        """An upper bound on the positions in use."""
        starts = zip(self.length_S, self.node_S1[1:], self.node_S1, strict=False)
        return max(length + end - begin for length, end, begin in starts)


def pack(segments: Sequence[Segment]) -> Packed:
    """Lay the rows of all segments side by side."""
    tokens: list[int] = []
    wanted: list[int] = []
    first, parents = array("i", [0]), array("i")
    for segment in segments:
        rows, begin = len(segment.tokens), len(tokens)
        span = segment.span
        assert 0 < rows <= span.capacity - span.length, "rows without reserved slots"
        tokens.extend(segment.tokens)
        parents.extend(range(-1, rows - 1) if segment.parents is None else segment.parents)
        wanted.extend(range(begin + segment.logits_from, begin + rows))
        first.append(begin + rows)
    return Packed(
        tokens,
        array("i", [segment.span.base for segment in segments]),
        array("i", [segment.span.length for segment in segments]),
        first,
        first,
        parents,
        wanted,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The nodes behind the committed slots of a span, of which the last `rows` are run."""

    span: Span
    parents: Sequence[int]
    rows: int


def pack_parts(tokens: list[int], parts: Sequence[Part]) -> Packed:
    """The same for passes that go on from earlier ones. tokens: of the rows."""
    first, node, parents = array("i", [0]), array("i", [0]), array("i")
    for part in parts:
        assert 0 < part.rows <= len(part.parents) <= part.span.capacity - part.span.length
        parents.extend(part.parents)
        first.append(first[-1] + part.rows)
        node.append(len(parents))
    base = array("i", [part.span.base for part in parts])
    length = array("i", [part.span.length for part in parts])
    return Packed(tokens, base, length, first, node, parents, [])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows one below the other; those of one part are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def add(parts: list[Tensor], part: Tensor) -> None:
    """Put a part behind others that wait. It may be a view, into rows of all requests: once the
    next one comes it is copied, so that those need not be kept."""
    if parts:
        parts[-1] = parts[-1].clone()
    parts.append(part)
