"""Where the rows of a turn lie: in the pass, in its logits, in the store.

rows of a turn      pending tokens 0 ... n-1 | nodes of the draft n, n+1, ...
with logits                              n-1 | n, n+1, ...      (none unless the turn decides)
kept in the store               0 ... n-1    | n + node for the nodes of the accepted path
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.core import Verdict
from forerun.engine.scheduler import Batch, Turn
from forerun.models.target import Segment


def segment(turn: Turn) -> Segment:
    """What the target is asked to compute for a turn."""
    span, cached, rows = turn.request.span, turn.request.cached, turn.rows
    assert span
    tokens = turn.request.tokens[cached : cached + rows]
    logits_from = rows - 1 if turn.decides else rows
    if not turn.draft:
        return Segment(span, tokens, None, logits_from)
    tokens += turn.draft.tokens
    if turn.draft.is_chain:
        return Segment(span, tokens, None, logits_from)
    parents = [*range(-1, rows - 1), *(rows + parent for parent in turn.draft.parents)]
    return Segment(span, tokens, parents, logits_from)


def kept(turn: Turn) -> Sequence[int]:
    """The rows of a turn that stay in the store."""
    if not turn.verdict or not turn.verdict.path:
        return range(turn.rows)
    return [*range(turn.rows), *(turn.rows + node for node in turn.verdict.path)]


def outcome(turn: Turn) -> Verdict:
    """What followed the rows: the verdict or, inside a prompt, its next token."""
    return turn.verdict or Verdict((), turn.request.tokens[turn.request.cached])


def taps(batch: Batch, turns: Sequence[Turn], taps_RTD: Tensor) -> list[Tensor]:
    """For each of `turns`, the tapped hidden states of its rows that stay, [rows, T, hidden]; none
    of requests that are not followed."""
    first_row = {}
    end = 0
    for turn in batch.turns:
        first_row[turn.request.id] = end
        end += turn.rows + len(turn.draft)
    return [
        _rows(taps_RTD, first_row[turn.request.id], kept(turn)) if turn.followed else taps_RTD[:0]
        for turn in turns
    ]


def _rows(taps_RTD: Tensor, first: int, rows: Sequence[int]) -> Tensor:
    """Some rows of a turn (ascending). A view where it can be: copies cost more than any other line
    of a step, and mostly the drafter reads the rows before the next pass."""
    if rows[-1] == len(rows) - 1:  # none is left out
        return taps_RTD[first : first + len(rows)]
    return taps_RTD[[first + row for row in rows]]
