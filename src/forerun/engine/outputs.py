"""What the engine hands out: deltas while a request runs, its whole output when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import FinishReason, StepStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one stream.

    index: which of the request's `n` outputs.
    text: the text that became certain; it may lag behind the tokens, by an incomplete UTF-8
        character or by what could be the beginning of a stop string.
    sources: per token, who proposed it, "a+b" if both did; "" is the target itself.
    logprobs: per token; None if none were asked for.
    request_id: the id of the stream's `Request` in the engine.
    """

    index: int
    text: str
    token_ids: list[int]
    sources: list[str]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    request_id: int = -1


@dataclass(slots=True)
class Completion:
    """One of the `n` outputs of a request. `seed` gives the same tokens again."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    sources: list[str] = field(default_factory=list)
    seed: int = 0

    def append(self, delta: Delta) -> None:
        """Add what a step brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.sources += delta.sources
        self.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    prompt: None where the prompt was given as token ids.
    stats: counters of all `n` outputs together; their seconds are this request's share of the
        steps after its prompt had been read.
    ttft_s: from the request's arrival to its first token; seconds: to its last one.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    stats: StepStats
    ttft_s: float
    seconds: float
