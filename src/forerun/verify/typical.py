"""Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): faster, and not lossless.

A drafted token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p: any
plausible token passes, not only the one that the target would have drawn. Of all accepted paths the
longest wins, the likelier one in a tie, and the token after it is the target's own choice. p is the
law with all of the request's transforms, where Medusa applies the temperature only. Greedy requests
have only one plausible token; for them this is `follow`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from forerun.core import Draft, Request, Verdict
from forerun.errors import ConfigError
from forerun.sampling import Place, choose, law
from forerun.verify.base import Verifier
from forerun.verify.follow import root_rows


class Typical(Verifier):
    """Lossy. The defaults are Medusa's."""

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for option, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value <= 1:
                raise ConfigError(f"typical: {option} is {value}; choose a number in (0, 1]")
        self.epsilon = epsilon
        self.delta = delta

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        roots = root_rows(drafts)
        paths = [
            self.accepted_path(request, draft, logits_NV[root : root + 1 + len(draft)])
            for request, draft, root in zip(requests, drafts, roots, strict=True)
        ]
        rows = [
            root + 1 + path[-1] if path else root for root, path in zip(roots, paths, strict=True)
        ]
        places = [
            Place(request, [draft.tokens[node] for node in path])
            for request, draft, path in zip(requests, drafts, paths, strict=True)
        ]
        tokens = choose(logits_NV[rows], places)
        return [Verdict(path, token) for path, token in zip(paths, tokens, strict=True)]

    def accepted_path(self, request: Request, draft: Draft, logits_NV: Tensor) -> list[int]:
        """The longest accepted path, then the likeliest; logits_NV: the root's row, then nodes."""
        paths: dict[int, list[int]] = {-1: []}
        log_likelihood = {-1: 0.0}
        laws: dict[int, Tensor] = {}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in paths:
                continue
            if parent not in laws:
                place = Place(request, [draft.tokens[above] for above in paths[parent]])
                laws[parent] = law(logits_NV[1 + parent], place)
            chance = float(laws[parent][token])
            if chance > self.threshold(laws[parent]):
                paths[node] = [*paths[parent], node]
                log_likelihood[node] = log_likelihood[parent] + math.log(chance)
        return paths[max(paths, key=lambda node: (len(paths[node]), log_likelihood[node]))]

    def threshold(self, probs_V: Tensor) -> float:
        """The probability that a drafted token has to exceed; 1e-5 as in Medusa's code."""
        entropy = -float((probs_V * (probs_V + 1e-5).log()).sum())
        return min(self.epsilon, self.delta * math.exp(-entropy))
