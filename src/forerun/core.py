"""The plain data that every part of forerun speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from forerun.config import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.cache import Span

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(Settings):
    """How the tokens of a request are chosen and when it ends. Names and defaults as in vLLM.

    temperature 0 is greedy. top_k 0 or -1 keeps all tokens. `seed` None draws a fresh one.
    `logprobs` is the number of alternatives returned per token beside the chosen one.
    """

    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Annotated[int, Field(ge=1)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    skip_special_tokens: bool = True

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: object) -> object:
        return (stop,) if isinstance(stop, str) else stop or ()

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _ordered(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    def __hash__(self) -> int:
        values = dict(self)
        values["logit_bias"] = frozenset(self.logit_bias.items())
        return hash(tuple(values.values()))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits change before the law is formed (penalties or bias)."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


@dataclass(slots=True, eq=False)
class Request:
    """One stream of tokens on its way through the engine.

    tokens[:prompt_length] is the prompt, the rest is committed output. tokens[:span.length] have
    their keys and values in the store; the others are pending and are fed in the next passes.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop token ids, as they apply here
    span: Span | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        assert 0 < self.prompt_length <= len(self.tokens), "prompt_length <= len(tokens)"

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def cached(self) -> int:
        """How many tokens have their keys and values in the store."""
        return self.span.length if self.span else 0

    @property
    def remaining(self) -> int:
        """How many more tokens may be emitted."""
        return self.params.max_tokens - self.output_length


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes after the last committed token. N nodes, parents before children.

    parents: index of each node's parent; -1 hangs from the last committed token.
        A chain is -1, 0, 1, 2, ...
    survival: the drafter's estimate, per node, that it and all its ancestors are accepted; never
        larger than the parent's.
    probs_NV: the law each token was drawn from; None where it was certain (lookup, argmax) or
        where drafting is coupled to the request's noise.
    sources: who proposed each node; empty where all come from `Drafter.name`.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    survival: Sequence[float] = ()
    probs_NV: Tensor | None = None
    sources: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What survives of a draft: node indices from the root down, and the token that follows."""

    path: Sequence[int]
    next_token: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the unmodified logits (natural logarithm)."""

    chosen: float
    top: dict[int, float]


@dataclass(slots=True)
class StepStats:
    """Counters as vLLM defines them: passes with an empty draft are not `drafts`."""

    passes: int = 0  # target passes that emitted tokens for a request, plain ones included
    drafts: int = 0  # of these, passes that verified at least one drafted token
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # drafts whose accepted path reaches i
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    step_seconds: float = 0.0

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one request's share of a step."""
        self.passes += 1
        self.emitted_tokens += emitted
        if not drafted:
            return
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def add(self, other: StepStats) -> None:
        """Add another's counters to these."""
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count
        self.passes += other.passes
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.emitted_tokens += other.emitted_tokens
        self.draft_seconds += other.draft_seconds
        self.forward_seconds += other.forward_seconds
        self.step_seconds += other.step_seconds

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts: the mean acceptance length, bonus token included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted_tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        return [count / self.drafts for count in self.accepted_at]
