"""Traces of the drafters and models that are here."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import Draft, Request, SamplingParams
from forerun.drafters.tree import depths, outcomes, path
from forerun.engine.llm import LLM
from forerun.engine.scheduler import NOTHING, Turn
from forerun.engine.static import Static
from forerun.simulate.traces import Step, Text


class Recorder(Static):
    """Asks for a draft in every step and verifies none: texts come plainly, token by token, and
    what the drafter would have proposed is known at every place of them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Text] = []
        self._drafts: dict[int, dict[int, Draft]] = {}  # by request and number of its tokens

    def keep(self, turns: Sequence[Turn], rows: int, spent: float) -> list[Draft]:
        for turn in turns:
            drafts = self._drafts.setdefault(turn.request.id, {})
            drafts[len(turn.request.tokens)] = turn.draft
        return [NOTHING] * len(turns)

    def forget(self, request: Request) -> None:
        """A request has ended: now it is known what was right."""
        drafts = self._drafts.pop(request.id, {})
        steps = [
            _step(drafts.get(place, NOTHING), request.tokens[place:])
            for place in range(request.prompt_length + 1, len(request.tokens))
        ]
        self.texts.append(Text(prompt_tokens=request.prompt_length, steps=tuple(steps)))


def record(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Text]:
    """Answer the prompts plainly, with a draft at every place; the texts, as they end.

    The engine is used up by it: it goes on verifying nothing.
    """
    recorder = Recorder()
    llm.engine.plan = recorder
    llm.generate(prompts, params)
    return recorder.texts


def _step(draft: Draft, truth: Sequence[int]) -> Step:
    right = [node for node, hit in outcomes(draft, truth) if hit]
    deepest = max(right, key=depths(draft.parents).__getitem__, default=-1)
    return Step(
        parents=tuple(draft.parents),
        survival=tuple(draft.survival),
        accepted=tuple(path(draft.parents, deepest)),
    )
