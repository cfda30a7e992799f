"""From single answers to the figures that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

PLAIN = "plain"


@dataclass(frozen=True)
class Sample:
    """One batch of prompts answered once by one engine in one mode."""

    engine: str
    mode: str
    workload: str
    batch: int
    first_prompt: int  # index of the batch's first prompt in the workload
    outputs: list[list[int]]
    seconds: float
    ttft: float | None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tok_s(self) -> float:
        """Output tokens by wall time, prefill included."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Row:
    """What an engine in a mode did on a workload. Speeds are output tokens per second, prefill
    included: `tok_s` pooled (all tokens by all seconds), `tok_s_median` over batches. The ratios
    are medians over the same batches in the same run; null where the other was not measured."""

    engine: str
    mode: str
    workload: str
    batch: int
    prompts: int
    output_tokens: int
    seconds: float
    tok_s: float
    tok_s_median: float
    ttft_ms: float | None
    vs_own_plain: float | None
    vs_forerun_plain: float | None
    vs_transformers_plain: float | None
    vs_vllm_plain: float | None
    identical_to_own_plain: int | None
    prompts_compared: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def summarise(samples: Sequence[Sample]) -> list[Row]:
    """One row per engine, mode, workload and batch size, in order of first appearance."""
    groups: dict[tuple[str, str, str, int], list[Sample]] = {}
    for sample in samples:
        key = (sample.engine, sample.mode, sample.workload, sample.batch)
        groups.setdefault(key, []).append(sample)

    def plain(engine: str, workload: str, batch: int) -> list[Sample]:
        return groups.get((engine, PLAIN, workload, batch), [])

    rows = []
    for (engine, mode, workload, batch), own in groups.items():
        own_plain = plain(engine, workload, batch)
        seconds = sum(sample.seconds for sample in own)
        tokens = sum(sample.tokens for sample in own)
        ttfts = [sample.ttft for sample in own if sample.ttft is not None]
        row = Row(
            engine=engine,
            mode=mode,
            workload=workload,
            batch=batch,
            prompts=sum(len(sample.outputs) for sample in own),
            output_tokens=tokens,
            seconds=seconds,
            tok_s=tokens / seconds,
            tok_s_median=statistics.median(sample.tok_s for sample in own),
            ttft_ms=1000 * statistics.median(ttfts) if ttfts else None,
            vs_own_plain=ratio(own, own_plain),
            vs_forerun_plain=ratio(own, plain("forerun", workload, batch)),
            vs_transformers_plain=ratio(own, plain("transformers", workload, batch)),
            vs_vllm_plain=ratio(own, plain("vllm", workload, batch)),
            identical_to_own_plain=identical(own, own_plain) if own_plain else None,
            prompts_compared=sum(len(sample.outputs) for sample in own_plain),
        )
        rows.append(row)
    return rows


def ratio(own: Sequence[Sample], others: Sequence[Sample]) -> float | None:
    """Median over batches of the speed beside the other's on the same prompts."""
    theirs = {sample.first_prompt: sample for sample in others}
    pairs = [(s, theirs[s.first_prompt]) for s in own if s.first_prompt in theirs]
    return statistics.median(a.tok_s / b.tok_s for a, b in pairs if b.tokens) if pairs else None


def identical(own: Sequence[Sample], others: Sequence[Sample]) -> int:
    """How many prompts got the same tokens."""
    theirs = {sample.first_prompt: sample.outputs for sample in others}
    return sum(
        mine == other
        for sample in own
        for mine, other in zip(sample.outputs, theirs.get(sample.first_prompt, []), strict=False)
    )
