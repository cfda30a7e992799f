"""What speculation must not suffer from: a drafter that is never right, a text without patterns."""

from __future__ import annotations

import random
from collections.abc import Sequence

from forerun.config import Settings
from forerun.core import Draft, Request
from forerun.drafters.base import Drafter
from forerun.drafters.tree import chain
from forerun.tune.workloads import Prompt, Workload

SURE = 0.9  # what it says of every token, as good drafters may
PROMPTS, WORDS = 8, 24
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class AlwaysWrong(Drafter):
    """Proposes chains of random tokens and is sure of them; one in a vocabulary may be right.

    It does not learn from what became of them: to find out is left to the plan.
    """

    name = "wrong"
    options = Settings
    example = "wrong"
    runs_network = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dice = random.Random(0)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._chain(*each) for each in zip(requests, budgets, strict=True)]

    def _chain(self, request: Request, budget: int) -> Draft:
        nodes = min(budget, request.remaining - 1)
        tokens = [self._dice.randrange(self._vocab_size) for _ in range(nodes)]
        return Draft(tokens, chain(nodes), [SURE ** (depth + 1) for depth in range(nodes)])


def random_text(name: str) -> Workload:
    """Prompts of random letters: what stood there before says nothing of what follows."""
    dice = random.Random(0)
    texts = [" ".join(_word(dice) for _ in range(WORDS)) for _ in range(PROMPTS)]
    prompts = [Prompt(str(i), ({"role": "user", "content": each},)) for i, each in enumerate(texts)]
    return Workload(name, tuple(prompts))


def _word(dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=dice.randint(1, 6)))
