"""Texts and objectives to train on, small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.models.hub import LoadedModel
from forerun.train.capture import Batch, Capture
from forerun.train.examples import Example
from forerun.train.objectives import OBJECTIVES, Objective
from forerun.train.vocabulary import Vocabulary, full
from tiny import tiny_llama


def target(folder: Path) -> LoadedModel:
    """A target deep enough for three taps."""
    return tiny_llama(folder, layers=4, seed=1)


def text(*spans: tuple[int, int], length: int, seed: int) -> Example:
    """Random tokens, those in `spans` written by the assistant."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 250, (length,), generator=noise).tolist()
    supervised = [any(begin <= i < end for begin, end in spans) for i in range(length)]
    return Example(tokens, supervised, f"prompt {seed}")


def texts() -> list[Example]:
    """Answers that end a text, that are followed by more, of two turns, and too short to learn."""
    return [
        text((5, 12), length=12, seed=1),
        text((3, 9), length=14, seed=2),
        text((4, 8), (11, 16), length=17, seed=3),
        text((6, 7), length=7, seed=4),
    ]


def answers(model: LoadedModel, count: int, length: int = 24) -> list[Example]:
    """Random prompts of six tokens and what the target writes behind them, greedily."""
    noise = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 250, (count, 6), generator=noise).tolist()
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    written = [output.outputs[0].token_ids for output in LLM(model).generate(prompts, params)]
    return [
        Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), f"prompt {i}")
        for i, (prompt, answer) in enumerate(zip(prompts, written, strict=True))
    ]


def objective(
    kind: str, model: LoadedModel, vocabulary: Vocabulary | None = None, **options: Any
) -> Objective:
    """One whose random parts are large enough to matter."""
    made = OBJECTIVES[kind]
    vocabulary = vocabulary or full(model.target.info.vocab_size)
    noise = torch.Generator().manual_seed(5)
    found = made(made.settings(**options), model, vocabulary, noise)
    for parameter in found.network.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.data += (
                0.5 * parameter.shape[1] ** -0.5 * torch.randn(parameter.shape, generator=noise)
            )
    return found


def captured(objective: Objective, examples: list[Example]) -> Batch:
    return Capture(objective.target, objective.taps)(examples)
