"""What a drafter proposes at every place of some texts, and what of it is right.

Since a draft is known at every place, and not only where a pass happened to begin, any other way to
speculate can be replayed exactly. In a file the first line of JSON says where the drafts are from,
and each other line is a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from forerun.config import Settings
from forerun.core import Draft
from forerun.drafters.tree import chain
from forerun.errors import ConfigError

RIGHT, WRONG = 1, 0  # the tokens of a replayed draft
DIGITS = 4  # of survival, in files
TEXTS, LENGTH, PROMPT = 32, 256, 128  # made-up texts, and tokens of each and of its prompt


class Step(Settings):
    """A draft behind some token of a text. accepted: its nodes that the text goes through."""

    title = "step"

    parents: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    accepted: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _tree(self) -> Step:
        if len(self.parents) != len(self.survival):
            raise ValueError("every node needs a parent and its survival")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("parents stand before their children; -1 is the last token")
        above = [-1, *self.accepted[:-1]][: len(self.accepted)]
        nodes = range(len(self.parents))
        if [self.parents[node] if node in nodes else None for node in self.accepted] != above:
            raise ValueError("accepted nodes are a path, from its first token on")
        return self

    def draft(self) -> Draft:
        """Its tokens tell which of them are right."""
        tokens = [WRONG] * len(self.parents)
        for node in self.accepted:
            tokens[node] = RIGHT
        return Draft(tokens, self.parents, self.survival)


class Text(Settings):
    """One answer. steps: behind its first token, its second, ..., up to the one before the last."""

    title = "text"

    prompt_tokens: int
    steps: tuple[Step, ...]


class Source(Settings):
    """Where drafts are from."""

    title = "first line"

    forerun_trace: Literal[1] = 1
    model: str
    draft: str
    workloads: tuple[str, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Some texts with drafts; title: whose they are, in words."""

    title: str
    texts: Sequence[Text]


def made_up(acceptance: Sequence[float], claims: Sequence[float], seed: int = 0) -> Trace:
    """Chains of which each token is right with its chance, whatever else is.

    acceptance: of the first, second, ... token if those before it are right. claims: what the
    drafter takes that chance for.
    """
    if len(acceptance) != len(claims):
        raise ConfigError(
            f"{len(claims)} claimed chances for {len(acceptance)} tokens; give one for each"
        )
    depth = len(acceptance)
    survival = tuple(accumulate(claims, mul))
    steps = [
        Step(parents=tuple(chain(depth)), survival=survival, accepted=tuple(range(right)))
        for right in range(depth + 1)
    ]
    draws = np.random.default_rng(seed).random((TEXTS, LENGTH - 1, depth)) < acceptance
    counts = np.cumprod(draws, axis=2).sum(axis=2).tolist()
    texts = [Text(prompt_tokens=PROMPT, steps=tuple(steps[n] for n in line)) for line in counts]
    return Trace("chains with the acceptance of the table", texts)


def write(path: Path, source: Source, texts: Iterable[Text]) -> None:
    """Write a trace."""
    lines = [source.model_dump_json()]
    for text in texts:
        steps = [
            {
                "parents": step.parents,
                "survival": [round(chance, DIGITS) for chance in step.survival],
                "accepted": step.accepted,
            }
            if step.parents
            else {}
            for step in text.steps
        ]
        lines.append(json.dumps({"prompt_tokens": text.prompt_tokens, "steps": steps}))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read(path: Path) -> Trace:
    """Read a trace. Raises `ConfigError` for what is none."""
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; 'bench --trace' writes traces") from None
    source = Source(**_record(path, 1, first))
    texts = [Text(**_record(path, number, line)) for number, line in enumerate(rest, 2)]
    if not any(text.steps for text in texts):
        raise ConfigError(f"{path} holds no drafts; record it again with longer answers")
    return Trace(f"{source.draft} on {', '.join(source.workloads)} ({source.model})", texts)


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} line {number} is no JSON object; 'bench --trace' writes traces")
    return found
