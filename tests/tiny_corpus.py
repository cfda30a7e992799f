"""Small corpora, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.models.hub import LoadedModel
from forerun.train.corpus import train
from forerun.train.examples import Example


def example(tokens: Sequence[int], begin: int = 0) -> Example:
    """A conversation whose tokens from `begin` on are the assistant's."""
    return Example(list(tokens), [place >= begin for place in range(len(tokens))], "prompt")


def tiny_corpus(path: Path, model: LoadedModel, prompts: Sequence[str]) -> Path:
    """Counted in what the model answers to these prompts, greedily and not."""
    llm = LLM(model, kv_tokens=1024)
    sampled = SamplingParams(temperature=0.8, seed=99, max_tokens=60, n=2)
    examples = [
        example([*output.prompt_token_ids, *answer.token_ids], len(output.prompt_token_ids))
        for params in (sampled.model_copy(update={"temperature": 0.0}), sampled)
        for output in llm.generate(list(prompts), params)
        for answer in output.outputs
    ]
    train(examples, model, path)
    return path
