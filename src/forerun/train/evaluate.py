"""What a draft is worth: the engine answers held-out prompts with it, as `forerun bench` would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.models.hub import LoadedModel
from forerun.models.tokenizer import Tokenizer
from forerun.train.examples import Example
from forerun.tune.bench import PLAIN, Bench, Row, Setting
from forerun.tune.workloads import Prompt, Workload

NAME = "held-out"


@dataclass(frozen=True, slots=True)
class Trial:
    """Figures of `forerun bench`, see `tune/metrics.py`."""

    output_tokens: int

    acceptance_length: float
    acceptance_per_position: list[float]
    tokens_per_pass: float
    speedup: float
    identical: int
    prompts: int

    def __str__(self) -> str:
        places = " ".join(f"{rate:.2f}" for rate in self.acceptance_per_position)
        return (
            f"accepted {self.acceptance_length:.2f} tokens a pass (by position {places}), "
            f"{self.speedup:.2f}x of plain decoding on {self.prompts} held-out prompts"
        )

    def json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Question(Prompt):
    """A prompt that has been tokenised already."""

    tokens: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer, raw: bool = False) -> list[int]:
        return list(self.tokens)


def questions(examples: Sequence[Example], count: int) -> Workload:
    """The first prompts of held-out examples, each up to where the assistant first wrote."""
    first = {example.prompt: example for example in reversed(examples)}
    chosen = sorted(first.values(), key=lambda example: example.prompt)[:count]
    prompts = [
        _Question(
            example.prompt, (), False, tuple(example.tokens[: example.supervised.index(True)])
        )
        for example in chosen
    ]
    return Workload(NAME, tuple(prompt for prompt in prompts if prompt.tokens))


def evaluate(
    model: LoadedModel, specs: Sequence[str], workload: Workload, max_tokens: int
) -> dict[str, Trial]:
    """Answer the prompts greedily, plainly and with each draft in turn, one prompt at a time."""

    def start(spec: str, size: int) -> LLM:
        return LLM(model, draft=spec, max_num_seqs=size)

    params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens)
    bench = Bench(model, Setting([workload], specs, params=params), start)
    for _ in bench.run():
        pass
    return {row.spec: _trial(row) for row in bench.rows() if row.spec != PLAIN}


def _trial(row: Row) -> Trial:
    return Trial(
        row.output_tokens,
        row.acceptance_length,
        row.acceptance_per_position,
        row.tokens_per_pass,
        row.speedup,
        row.identical,
        row.prompts,
    )
