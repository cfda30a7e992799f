"""Drafts against plain decoding: the same prompts, in turn, on one loaded model.

For each group of prompts every spec runs once before the next group starts, and the order rotates
from group to group, so that a machine that warms up or slows down does so for all of them. Engines
are made anew for every workload and batch size: none has seen the answers before.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

from forerun.core import PHASES, SamplingParams, StepStats
from forerun.drafters.spec import parse
from forerun.errors import ConfigError, PromptError
from forerun.tune.workloads import Workload

if TYPE_CHECKING:
    from forerun.engine.outputs import RequestOutput
    from forerun.models.hub import LoadedModel

PLAIN = "none"
WARM_UP = "One, two, three, four, five, six, seven, eight, nine, ten, one, two, three, four"
WARM_UP_TOKENS = 8


class Engine(Protocol):
    """What is measured: answers a group of prompts together."""

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What to measure. Plain decoding always runs.

    batches: how many prompts run together. static: all that a draft proposes is checked.
    """

    workloads: Sequence[Workload]
    specs: Sequence[str]
    batches: Sequence[int] = (1,)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0, seed=0))
    repeat: int = 1
    raw: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        if self.params.seed is None:
            raise ConfigError("a benchmark compares texts: give it a seed")
        if self.params.n != 1:
            raise ConfigError("a benchmark measures one answer per prompt: leave n at 1")
        names = [workload.name for workload in self.workloads]
        if len(set(names)) < len(names):
            raise ConfigError(f"two workloads have one name ({', '.join(names)}); rename a file")
        if not self.batches or min(self.batches) < 1 or self.repeat < 1:
            raise ConfigError("batch sizes and repetitions must be 1 or more")


@dataclass(frozen=True, slots=True)
class Round:
    """One group of prompts, answered once with each spec."""

    workload: str
    batch: int
    place: int  # of the first prompt in the workload
    outputs: dict[str, list[RequestOutput]]
    seconds: dict[str, float]
    peak_rss_mb: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of results. `metrics.py` defines the figures.

    break_even: acceptance length with which drafts would take as long as they save.
    """

    model: str
    dtype: str
    device: str
    method: str
    spec: str
    workload: str
    batch: int
    temperature: float
    prompts: int
    output_tokens: int
    seconds: float
    tok_s: float
    plain_tok_s: float
    speedup: float
    acceptance_length: float
    tokens_per_pass: float
    acceptance_per_position: list[float]
    draft_ms: float
    verify_ms: float
    other_ms: float
    identical: int
    prompts_compared: int
    ttft_ms: float
    tpot_ms: float | None
    peak_rss_mb: float
    step_ms: dict[str, float]  # by phase
    rows_per_pass: float
    plain_share: float
    break_even: float | None
    calibration: list[list[float]]  # per tenth of survival: nodes, expected and observed survival
    calibration_error: float
    cost_error: float


class Bench:
    """A run over all settings. `rounds` grows while it runs, `rows()` works at any time.

    start: makes an engine for a spec and a batch size, on the loaded model.
    Raises `PromptError` at once for a prompt that the model has no room for.
    """

    def __init__(
        self, model: LoadedModel, setting: Setting, start: Callable[[str, int], Engine]
    ) -> None:
        self.model = model
        self.setting = setting
        self.specs = list(dict.fromkeys([PLAIN, *setting.specs]))
        self.rounds: list[Round] = []
        self._start = start
        self.prompts = {workload.name: self._encode(workload) for workload in setting.workloads}

    @property
    def runs(self) -> int:
        """How many times `run` yields when nothing stops it."""
        groups = sum(
            -(-len(prompts) // batch)
            for prompts in self.prompts.values()
            for batch in self.setting.batches
        )
        return groups * len(self.specs) * self.setting.repeat

    def run(self) -> Iterator[str]:
        """Measure; yields what was done after every group and spec."""
        for _ in range(self.setting.repeat):
            for workload, prompts in self.prompts.items():
                for batch in self.setting.batches:
                    yield from self._session(workload, prompts, batch)

    def rows(self) -> list[Row]:
        """Results of the rounds that are complete."""
        cells = dict.fromkeys((round.workload, round.batch) for round in self.rounds)
        return [self._row(spec, *cell) for cell in cells for spec in self.specs]

    def _encode(self, workload: Workload) -> list[list[int]]:
        longest = self.model.target.info.max_length
        encoded = []
        for prompt in workload.prompts:
            tokens = prompt.encode(self.model.tokenizer, self.setting.raw)
            if len(tokens) >= longest:
                raise PromptError(
                    f"prompt {prompt.id} of {workload.name} has {len(tokens)} tokens, but the "
                    f"model's context ends at {longest}; take it out, or shorten it"
                )
            encoded.append(tokens)
        return encoded

    def _session(self, workload: str, prompts: list[list[int]], batch: int) -> Iterator[str]:
        engines = {spec: self._start(spec, batch) for spec in self.specs}
        for engine in engines.values():
            self._warm_up(engine, batch)
        for number, place in enumerate(range(0, len(prompts), batch)):
            group = prompts[place : place + batch]
            params = [self.params(place + i) for i in range(len(group))]
            shift = number % len(self.specs)
            outputs, seconds = {}, {}
            for spec in self.specs[shift:] + self.specs[:shift]:
                begin = time.perf_counter()
                outputs[spec] = engines[spec].generate(group, params)
                seconds[spec] = time.perf_counter() - begin
                if len(seconds) == len(self.specs):
                    peak = peak_rss_mb()
                    self.rounds.append(Round(workload, batch, place, outputs, seconds, peak))
                yield f"{workload}, batch {batch}, {spec}"

    def _warm_up(self, engine: Engine, batch: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        engine.generate([self.model.tokenizer.encode(WARM_UP)] * batch, [params] * batch)

    def params(self, place: int) -> SamplingParams:
        """Every prompt has its own seed, the same with every spec and batch size."""
        seed = self.setting.params.seed
        assert seed is not None
        return self.setting.params.model_copy(update={"seed": seed + place})

    def _row(self, spec: str, workload: str, batch: int) -> Row:
        rounds = [r for r in self.rounds if (r.workload, r.batch) == (workload, batch)]
        outputs = [output for r in rounds for output in r.outputs[spec]]
        tokens = sum(map(_length, outputs))
        seconds = sum(r.seconds[spec] for r in rounds)
        plain_tokens = sum(_length(output) for r in rounds for output in r.outputs[PLAIN])
        plain_tok_s = plain_tokens / sum(r.seconds[PLAIN] for r in rounds)
        stats = self._stats(spec, rounds)
        passes = max(stats.passes - len(outputs), 1)  # the first of each answer ends its prompt
        others = stats.step_seconds - stats.draft_seconds - stats.forward_seconds
        same = _compare(rounds, spec)
        tpots = [tpot for output in outputs if (tpot := _tpot(output)) is not None]
        info = self.model.target.info
        step_ms = {phase: 1000 * getattr(stats, f"{phase}_seconds") / passes for phase in PHASES}
        return Row(
            model=self.model.name,
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(info.device),
            method=method(spec),
            spec=spec,
            workload=workload,
            batch=batch,
            temperature=self.setting.params.temperature,
            prompts=len(outputs),
            output_tokens=tokens,
            seconds=seconds,
            tok_s=tokens / seconds,
            plain_tok_s=plain_tok_s,
            speedup=tokens / seconds / plain_tok_s,
            acceptance_length=stats.acceptance_length,
            tokens_per_pass=stats.tokens_per_pass,
            acceptance_per_position=stats.acceptance_per_position,
            draft_ms=1000 * stats.draft_seconds / passes,
            verify_ms=1000 * stats.forward_seconds / passes,
            other_ms=1000 * others / passes,
            identical=sum(same),
            prompts_compared=len(same),
            ttft_ms=1000 * median(output.ttft_s for output in outputs),
            tpot_ms=1000 * median(tpots) if tpots else None,
            peak_rss_mb=rounds[-1].peak_rss_mb,
            step_ms=step_ms,
            rows_per_pass=stats.rows_per_pass,
            plain_share=stats.plain_share,
            break_even=break_even(stats, self._stats(PLAIN, rounds)),
            calibration=[
                [nodes, expected / max(nodes, 1), accepted / max(nodes, 1)]
                for nodes, expected, accepted in zip(
                    stats.verified_in, stats.expected_in, stats.accepted_in, strict=True
                )
            ],
            calibration_error=stats.calibration_error,
            cost_error=stats.cost_error,
        )

    def _stats(self, spec: str, rounds: Sequence[Round]) -> StepStats:
        """Counters of all answers together."""
        stats = StepStats()
        for round in rounds:
            for output in round.outputs[spec]:
                stats.add(output.stats)
        return stats


def break_even(stats: StepStats, plain: StepStats) -> float | None:
    """The mean acceptance length with which drafts would take as long as they save.

    With a share d of passes drafted, a pass brings 1 + d * (length - 1) tokens; that has to be as
    many as the times that it takes longer than a plain one. None where nothing was drafted.
    """
    if not stats.drafts or not plain.step_seconds:
        return None
    longer = stats.step_seconds / stats.passes / (plain.step_seconds / plain.passes)
    return 1 + (longer - 1) / (1 - stats.plain_share)


def method(spec: str) -> str:
    """The drafters of a spec without their options: `ngram:k=8+suffix` is `ngram+suffix`."""
    return "+".join(drafter.name for drafter in parse(spec)) or PLAIN


def peak_rss_mb() -> float:
    """The largest resident memory of this process so far, all engines and the model together."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _length(output: RequestOutput) -> int:
    return len(output.outputs[0].token_ids)


def _tpot(output: RequestOutput) -> float | None:
    """Seconds per token after the first; undefined for a single one."""
    tokens = _length(output)
    return (output.seconds - output.ttft_s) / (tokens - 1) if tokens > 1 else None


def _compare(rounds: Sequence[Round], spec: str) -> list[bool]:
    """Per prompt, whether the tokens are those of plain decoding in the same round. Plain decoding
    itself is compared with its first round, where it is repeated."""
    first: dict[int, Round] = {}
    same = []
    for current in rounds:
        reference = current if spec != PLAIN else first.setdefault(current.place, current)
        if spec == PLAIN and reference is current:
            continue
        pairs = zip(current.outputs[spec], reference.outputs[PLAIN], strict=True)
        same += [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs]
    return same
