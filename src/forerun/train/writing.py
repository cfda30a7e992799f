"""Prompts that an instruction-tuned model writes itself.

Such a model has read so many conversations that, given the chat template up to where the user
begins, it writes a user's turn (Xu et al., Magpie, arXiv 2406.08464). A system turn before it
steers the topic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.errors import PromptError
from forerun.models.tokenizer import Tokenizer
from forerun.train.filters import Seen, fault, normalised
from forerun.train.seeds import seed_from
from forerun.train.turns import Message, around, chat_template, closing, end_of_turn


@dataclass(slots=True)
class _Attempt:
    """A user's turn on its way."""

    number: int
    text: str = ""
    finish_reason: str | None = None


class Writer:
    """Samples user's turns.

    systems: system turns that are taken in turn; none leaves it to the chat template.
    keep_system: whether a prompt holds the system turn that it was written under.
    params: temperature, truncation and longest turn. batch: how many are sampled together.
    Raises `PromptError` when the model has no chat template, or one that marks no user's turn.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        systems: Sequence[str] = (),
        keep_system: bool = False,
        batch: int = 32,
        seed: int = 0,
    ) -> None:
        self.llm = llm
        self.params = params
        self.systems = [_system(text) for text in systems] or [[]]
        self.keep_system = keep_system
        self.batch = batch
        self.seed = seed
        self._openings = [_opening(llm.tokenizer, system, params) for system in self.systems]

    def write(
        self, seen: Seen, first: int, dropped: Counter[str]
    ) -> Iterator[tuple[int, list[dict[str, str]]]]:
        """New prompts without end, each with the number of its attempt, in the order of attempts.

        What an attempt brings depends on the settings and its number alone, so a run that begins
        at `first` continues one that ended before it. seen: what must not come again.
        dropped: counts, by their reasons, the attempts that were no good.
        """
        for attempt in self._sample(first):
            text = normalised(attempt.text)
            long = "too long" if attempt.finish_reason == "length" else None
            if why := long or fault(text) or seen.add(text):
                dropped[why] += 1
                continue
            system = self.systems[attempt.number % len(self.systems)]
            kept = system if self.keep_system else []
            yield attempt.number, [*kept, {"role": "user", "content": text}]

    def _sample(self, first: int) -> Iterator[_Attempt]:
        """Every attempt from `first` on, in order; those behind it run ahead."""
        engine = self.llm.engine
        numbers = itertools.count(first)
        running: dict[int, _Attempt] = {}  # by the ids of their streams
        ended: dict[int, _Attempt] = {}
        try:
            for due in itertools.count(first):
                while due not in ended:
                    while len(running) < self.batch:
                        attempt = _Attempt(next(numbers))
                        running[self._begin(attempt.number)] = attempt
                    for delta in engine.step():
                        attempt = running[delta.request_id]
                        attempt.text += delta.text
                        if delta.finish_reason:
                            attempt.finish_reason = delta.finish_reason
                            ended[attempt.number] = running.pop(delta.request_id)
                yield ended.pop(due)
        finally:
            for stream in running:
                engine.abort(stream)

    def _begin(self, number: int) -> int:
        """Queue an attempt; the id of its stream."""
        place = number % len(self.systems)
        tokens, params = self._openings[place]
        seed = seed_from("write", self.seed, self.systems[place], number)
        (generation,) = self.llm.engine.add(tokens, params.model_copy(update={"seed": seed}))
        return generation.request.id


def _system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}]


def _opening(
    tokenizer: Tokenizer, system: Sequence[Message], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """The tokens up to where the user begins, and the parameters with what ends the turn."""
    template = chat_template(tokenizer)
    messages = [*system, {"role": "user", "content": ""}]
    before = around(template, messages, len(system), asks=False).before
    end = closing(template, messages, len(system))
    tokens = tokenizer.encode(before, special=False)
    if not tokens or not end:
        raise PromptError(
            "the chat template of this model does not mark a user's turn; give prompts of your own"
        )
    control = end_of_turn(tokenizer, end)
    stops = {"stop_token_ids": (control[-1],)} if control else {"stop": (end,)}
    return tokens, params.model_copy(update=stops)
