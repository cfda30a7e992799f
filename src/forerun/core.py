"""The plain data that every part of forerun speaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from sys import intern
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from forerun.config import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.cache import Span

FinishReason = Literal["stop", "length", "abort"]

# The parts of a step whose time is told; `draft` includes what the drafter learns afterwards,
# `plan` whom it is asked for and what the plan learns.
PHASES = ("schedule", "draft", "plan", "forward", "verify", "commit", "emit")
SECONDS = {phase: intern(f"{phase}_seconds") for phase in PHASES}  # where `StepStats` has it
BINS = 10  # of survival, from 0 to 1


class Speculation(Settings):
    """What a request allows of drafting. enabled: whether it may be drafted for at all.

    draft: the name of one of the drafters that the engine was loaded with, which alone is asked, or
    `none`; None asks whom the plan takes. max_draft_tokens: most tokens drafted for one pass; None
    leaves it to the plan.
    """

    title = "speculation"

    enabled: bool = True
    draft: str | None = None
    max_draft_tokens: Annotated[int, Field(ge=1)] | None = None


class SamplingParams(Settings):
    """How the tokens of a request are chosen and when it ends. Names and defaults as in vLLM.

    temperature 0 is greedy. top_k 0 or -1 keeps all tokens. `seed` None draws a fresh one.
    `logprobs` is the number of alternatives returned per token beside the chosen one.
    `speculation` has no influence on the tokens, only on how fast they come.
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
    speculation: Speculation = Speculation()

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
    call: the same for those whose caller waits for all of them; None: for this one alone.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop token ids, as they apply here
    span: Span | None = None
    finish_reason: FinishReason | None = None
    call: int | None = None

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
    sources: who proposed each node; empty where all come from the drafter that was asked.
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
    """Counters as vLLM defines them: passes with an empty draft are not `drafts`.

    verified_in, expected_in, accepted_in: per tenth of survival, the nodes that were verified, the
        sum of their survival as the drafter estimated it, and how many were accepted.
    *_seconds: of steps that decode, by `PHASES` and in whole; where several requests share a step,
        in proportion to their rows. predicted_seconds: what the plan expected of those steps that
        it could predict; missed_seconds: by how much it was wrong, either way.
    """

    passes: int = 0  # target passes that emitted tokens for a request, plain ones included
    drafts: int = 0  # of these, passes that verified at least one drafted token
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    asked: int = 0  # passes before which the drafter was asked for a draft
    accepted_at: list[int] = field(default_factory=list)  # drafts whose accepted path reaches i
    verified_in: list[int] = field(default_factory=lambda: [0] * BINS)
    expected_in: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted_in: list[int] = field(default_factory=lambda: [0] * BINS)
    schedule_seconds: float = 0.0
    draft_seconds: float = 0.0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    emit_seconds: float = 0.0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    missed_seconds: float = 0.0

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

    def compare(self, survival: Sequence[float], path: Collection[int]) -> None:
        """Count what was expected of a draft's nodes against those that were accepted."""
        verified, expected, accepted = self.verified_in, self.expected_in, self.accepted_in
        for node, chance in enumerate(survival):
            bin = min(int(chance * BINS), BINS - 1)
            verified[bin] += 1
            expected[bin] += chance
            accepted[bin] += node in path

    def spend(
        self,
        share: float,
        seconds: Mapping[str, float],
        step_seconds: float,
        predicted: float,
        missed: float,
    ) -> None:
        """Add a share of the time of a step. seconds: by phase."""
        for phase, name in SECONDS.items():
            setattr(self, name, getattr(self, name) + share * seconds[phase])
        self.step_seconds += share * step_seconds
        self.predicted_seconds += share * predicted
        self.missed_seconds += share * missed

    def add(self, other: StepStats) -> None:
        """Add another's counters to these."""
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, list):
                for place, count in enumerate(theirs):
                    mine[place] += count
            else:
                setattr(self, each.name, mine + theirs)

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

    @property
    def rows_per_pass(self) -> float:
        """Rows of a decoding request in a pass: its last token and the verified nodes."""
        return 1 + self.draft_tokens / self.passes if self.passes else 0.0

    @property
    def plain_share(self) -> float:
        """Share of the passes that verified no drafted token."""
        return 1 - self.drafts / self.passes if self.passes else 0.0

    @property
    def calibration_error(self) -> float:
        """By how much the survival of a verified node differs from what became of such nodes: the
        mean over nodes of |expected - observed| in their bin (expected calibration error, Guo et
        al. 2017)."""
        nodes = sum(self.verified_in)
        pairs = zip(self.expected_in, self.accepted_in, strict=True)
        return sum(abs(expected - count) for expected, count in pairs) / nodes if nodes else 0.0

    @property
    def cost_error(self) -> float:
        """By how much predictions of a step's time were wrong, relative to that time."""
        return self.missed_seconds / self.predicted_seconds if self.predicted_seconds else 0.0
