"""What a source believes of the tokens that may follow: a law on every path, not only a draft.

Sources that count know a law behind any tokens. A network knows one at the nodes of its own tree
(`of_draft`), or one for each place ahead whatever stands before it (`of_places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core import Draft

Beliefs = Iterable[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Law:
    """One source's beliefs behind the last committed token of one request.

    root: the state there; what states are is the source's own business.
    successors: the tokens that may follow in a state, each once, with the chance that it follows if
    all before it are right; none where the source knows nothing. They sum up to at most 1.
    advance: the state behind a token, whether it was among the successors or not.
    nodes, depth: how many tokens the source would propose, in all and in one path.
    floor: paths that are less likely are not asked about.
    """

    root: Any
    successors: Callable[[Any], Beliefs]
    advance: Callable[[Any, int], Any]
    nodes: int
    depth: int
    floor: float = 0.0


SILENT = Law(None, lambda state: (), lambda state, token: None, nodes=0, depth=0)


def of_draft(draft: Draft) -> Law:
    """The law that a finished tree stands for: known at its nodes and nowhere else."""
    if not draft.tokens:
        return SILENT
    below: list[dict[int, tuple[int, float]]] = [{} for _ in range(len(draft) + 1)]  # last: root
    survival = draft.survival
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        above = survival[parent] if parent >= 0 else 1.0
        below[parent][token] = node, survival[node] / above if above else 0.0

    def successors(state: int | None) -> Beliefs:
        if state is None:
            return ()
        return [(token, chance) for token, (_, chance) in below[state].items()]

    def advance(state: int | None, token: int) -> int | None:
        found = None if state is None else below[state].get(token)
        return found[0] if found else None

    return Law(-1, successors, advance, nodes=len(draft), depth=len(draft))


def of_places(beliefs: Sequence[Sequence[tuple[int, float]]], nodes: int) -> Law:
    """The law of independent places: the d-th token of every path is as likely as `beliefs[d]`."""
    return Law(
        0, beliefs.__getitem__, lambda place, token: place + 1, nodes=nodes, depth=len(beliefs)
    )
