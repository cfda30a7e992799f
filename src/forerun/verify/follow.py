"""The default rule: the target's own choice, followed through the tree as long as a node matches.

The choice at a place is a pure function of the prefix (`forerun.sampling.choose`), so the output is
the plain one token for token, for any draft. Taken over all seeds this is sampling from the law
at each node and moving to the child that was drawn.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.models import kernels
from forerun.sampling import Place, choose, largest_of, takes_largest
from forerun.verify.base import Verifier


class Follow(Verifier):
    """Exact text: the tokens of plain decoding with the same seed."""

    name: ClassVar[str] = "follow"

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        return follow(requests, drafts, logits_NV, root_rows(drafts))


def root_rows(drafts: Sequence[Draft]) -> list[int]:
    """Per draft, the row of the last committed token; node i has the i + 1st row after it."""
    roots, row = [], 0
    for draft in drafts:
        roots.append(row)
        row += 1 + len(draft.tokens)
    return roots


def follow(
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    logits_NV: Tensor,
    roots: Sequence[int],
) -> list[Verdict]:
    """One verdict per request whose rows begin at `roots[i]`; the logits may hold others', too."""
    lib = kernels.for_scores(logits_NV)
    if lib is not None and all(map(takes_largest, requests)):
        logits_NV = logits_NV.contiguous()
        return [_followed(lib, *pair, logits_NV) for pair in zip(drafts, roots, strict=True)]
    walks = [_Walk(*parts) for parts in zip(requests, drafts, roots, strict=True)]
    sampled = [walk for walk in walks if not walk.is_argmax]
    if len(sampled) < len(walks):
        largest = largest_of(logits_NV)
        for walk in walks:
            while walk.is_argmax and walk.advance(largest(walk.row)):
                pass
    while sampled:  # only rows on a path are sampled from, one depth of all requests at a time
        places, rows = [walk.place for walk in sampled], [walk.row for walk in sampled]
        tokens = choose(logits_NV, places, rows)
        sampled = [walk for walk, token in zip(sampled, tokens, strict=True) if walk.advance(token)]
    return [walk.verdict for walk in walks]


def _followed(lib: ctypes.CDLL, draft: Draft, root: int, logits_NV: Tensor) -> Verdict:
    """The walk of a greedy request, compiled."""
    size, count = logits_NV.shape[1], len(draft)
    tokens, parents = array("q", draft.tokens), array("i", draft.parents)
    path, next_token = array("i", bytes(4 * count)), array("q", (0,))
    accepted = lib.follow(
        logits_NV.data_ptr() + 4 * root * size,
        size,
        tokens.buffer_info()[0],
        parents.buffer_info()[0],
        count,
        path.buffer_info()[0],
        next_token.buffer_info()[0],
    )
    return Verdict(path[:accepted].tolist(), next_token[0])


class _Walk:
    """A way down one draft. All nodes that spell the text so far are walked at once, so that
    siblings with the same token lose nothing."""

    __slots__ = ("draft", "is_argmax", "next_token", "nodes", "request", "root", "text")

    def __init__(self, request: Request, draft: Draft, root: int) -> None:
        self.request = request
        self.draft = draft
        self.root = root
        self.nodes = [-1]
        self.text: list[int] = []
        self.is_argmax = Place(request).is_argmax  # and then everywhere below

    @property
    def row(self) -> int:
        return self.root + 1 + self.nodes[0]

    @property
    def place(self) -> Place:
        return Place(self.request, tuple(self.text))

    def advance(self, token: int) -> bool:
        """Move to the nodes that hold the target's choice; False where there are none."""
        tokens, parents = self.draft.tokens, self.draft.parents
        matching = [
            node
            for node in range(self.nodes[0] + 1, len(tokens))
            if tokens[node] == token and parents[node] in self.nodes
        ]
        if matching:
            self.nodes = matching
            self.text.append(token)
        else:
            self.next_token = token
        return bool(matching)

    @property
    def verdict(self) -> Verdict:
        path = []
        node = self.nodes[0]
        while node >= 0:
            path.append(node)
            node = self.draft.parents[node]
        return Verdict(path[::-1], self.next_token)
