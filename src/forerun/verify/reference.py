"""The judge of the judges: `follow` in the most literal way, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.sampling import Place, choose
from forerun.verify.base import Verifier


class Reference(Verifier):
    """Writes the target's own text and looks, after each token, for a node that spells it."""

    name: ClassVar[str] = "reference"

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        verdicts = []
        first = 0
        for request, draft in zip(requests, drafts, strict=True):
            rows_NV = logits_NV[first : first + 1 + len(draft)]
            verdicts.append(judge_one(request, draft, rows_NV))
            first += 1 + len(draft)
        return verdicts


def judge_one(request: Request, draft: Draft, logits_NV: Tensor) -> Verdict:
    """The verdict for one request; logits_NV: the root's row, then one per node."""
    paths = [path_to(draft, node) for node in range(len(draft))]
    path: list[int] = []
    text: list[int] = []
    while True:
        row = 1 + path[-1] if path else 0
        [token] = choose(logits_NV[row : row + 1], [Place(request, text)])
        longer = [other for other in paths if spelled(draft, other) == [*text, token]]
        if not longer:
            return Verdict(path, token)
        path = longer[0]
        text.append(token)


def path_to(draft: Draft, node: int) -> list[int]:
    """The nodes from the root down to this one."""
    above = draft.parents[node]
    return [node] if above < 0 else [*path_to(draft, above), node]


def spelled(draft: Draft, path: Sequence[int]) -> list[int]:
    """The tokens on a path."""
    return [draft.tokens[node] for node in path]
