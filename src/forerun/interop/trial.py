"""A draft tried on the target's own text: how often each token that it drafts is what follows.

The target answers a few questions greedily. One more pass over an answer gives the hidden states at
every layer boundary, so that a draft can be tried with other taps than it names, too.

    tokens      prompt ...... said by the target ......
    a place     the last token that a draft knows; the K tokens it drafts behind it were all said

A places, K drafted tokens, R rows, B boundaries, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun import sampling
from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment

QUESTIONS = (
    "How does a rainbow come about, and why are its colours always in the same order?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
)
LENGTH = 64  # tokens that the target says to each
ENOUGH = 0.1  # of the first drafted tokens are right with any draft worth having
GAIN, SIGMAS = 0.05, 4.0  # of all drafted tokens; and over the spread of paired places


@dataclass(frozen=True, slots=True)
class Speech:
    """A prompt and what the target said. taps_RBC: of every token at every boundary."""

    tokens: Sequence[int]
    prompt: int  # tokens that were not said
    taps_RBC: Tensor

    def places(self, ahead: int) -> Tensor:
        """The places with `ahead` tokens behind them, [A]."""
        return torch.arange(self.prompt - 1, len(self.tokens) - ahead)

    def said(self, ahead: int) -> Tensor:
        """What was said behind each of these places, [A, ahead]."""
        behind = self.places(ahead)[:, None] + torch.arange(1, ahead + 1)
        return torch.tensor(self.tokens)[behind]


@dataclass(frozen=True, slots=True)
class Other:
    """Another reading of the same tensors. remedy: what makes it the stated one."""

    reading: str
    remedy: str
    right_AK: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """Which drafted tokens were right, as the checkpoint is read and as it could be.

    unit: what drafts one token. commonest: share of the commonest token among those drafted first.
    right_by_rank: per drafted token and rank, the share of places where that candidate was right;
    of Medusa heads alone, for trees of fixed shape.
    """

    unit: str
    right_AK: Tensor
    commonest: float
    others: Sequence[Other] = field(default=())
    right_by_rank: Sequence[Sequence[float]] = field(default=())

    @property
    def near_chance(self) -> bool:
        first = _shares(self.right_AK)[0]
        return first < ENOUGH or first < self.commonest

    @property
    def better(self) -> Other | None:
        """The reading that is much better than the stated one."""
        found = [other for other in self.others if is_better(other.right_AK, self.right_AK)]
        return max(found, key=lambda other: other.right_AK.float().mean().item(), default=None)

    def sentences(self, target: str) -> list[str]:
        """What was found, in plain words; what looks wrong starts with `! `."""
        places, depth = self.right_AK.shape
        kept = self.right_AK.long().cumprod(1).sum(1).float().mean().item()
        shares = _percent(self.right_AK)
        said = [
            f"tried on {places} places in greedy answers of {target}: {self.unit} by {self.unit}, "
            f"{shares} of its tokens are right; a chain of {depth} keeps {kept:.1f}"
        ]
        if other := self.better:
            shares = _percent(other.right_AK)
            return [*said, f"! with {other.reading}, {shares} would be right: {other.remedy}"]
        if self.near_chance:
            said.append(
                "! that is little more than chance: it is not trained, or made for another model"
                + "".join(f"; no better with {other.reading}" for other in self.others)
            )
        return said

    def facts(self) -> dict[str, Any]:
        """The same as numbers."""
        better = self.better
        return {
            "places": len(self.right_AK),
            "right": _shares(self.right_AK),
            "right_by_rank": self.right_by_rank or None,
            "commonest_token": self.commonest,
            "near_chance": self.near_chance,
            "other_readings": {other.reading: _shares(other.right_AK) for other in self.others},
            "better": better.reading if better else None,
        }


def is_better(one_AK: Tensor, other_AK: Tensor) -> bool:
    """Whether one reading is right so much more often that it cannot be luck.

    Places are compared one by one, over the levels that both have.
    """
    depth = min(one_AK.shape[1], other_AK.shape[1])
    gain_A = (one_AK[:, :depth].long() - other_AK[:, :depth].long()).sum(1).float()
    gained = gain_A.sum().item()
    spread = gain_A.square().sum().sqrt().item()
    least = GAIN * gain_A.numel() * depth
    worth_having = one_AK.float().mean(0).max() >= ENOUGH
    return bool(worth_having) and gained > max(SIGMAS * spread, least)


def tried(
    unit: str,
    speeches: Sequence[Speech],
    stated: Callable[[Speech], Tensor],
    others: Sequence[tuple[str, str, Callable[[Speech], Tensor]]] = (),
) -> Trial:
    """Run readings (what they are, the remedy, how it drafts) over all texts."""

    def over_all(right: Callable[[Speech], Tensor]) -> Tensor:
        return torch.cat([right(speech).cpu() for speech in speeches])

    firsts = torch.cat([speech.said(1) for speech in speeches])
    commonest = firsts.unique(return_counts=True)[1].max().item() / len(firsts)
    found = [Other(reading, remedy, over_all(right)) for reading, remedy, right in others]
    return Trial(unit, over_all(stated), commonest, found)


@torch.inference_mode()
def speak(model: LoadedModel) -> list[Speech]:
    """Let the target answer the questions, each up to its end.

    Raises `ConfigError` where it says next to nothing.
    """
    prompts = [_prompt(model, question) for question in QUESTIONS]
    texts = [
        _until_end(text, len(prompt), model.stop_ids)
        for text, prompt in zip(_continued(model, prompts), prompts, strict=True)
    ]
    if sum(map(len, texts)) - sum(map(len, prompts)) < LENGTH:
        raise ConfigError(f"{model.name} ends its answers at once, so no draft can be tried on it")
    boundaries = range(model.target.info.layers + 1)
    speeches = []
    for text, prompt in zip(texts, prompts, strict=True):
        store = model.target.new_store(len(text))
        span = store.open()
        store.reserve(span, len(text))
        segment = Segment(span, text, logits_from=len(text))
        taps_RBC = model.target.forward([segment], store, boundaries).taps_RTD
        assert taps_RBC is not None
        speeches.append(Speech(text, len(prompt), taps_RBC))
    return speeches


def _prompt(model: LoadedModel, question: str) -> list[int]:
    if model.tokenizer.has_chat_template:
        return model.tokenizer.chat([{"role": "user", "content": question}])
    return model.tokenizer.encode(question)


def _continued(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    slots = sum(map(len, texts)) + LENGTH * len(texts)
    store = model.target.new_store(2 * slots)  # spans take more than they need
    spans = [store.open() for _ in texts]
    for span, text in zip(spans, texts, strict=True):
        store.reserve(span, len(text) + LENGTH)
    for _ in range(LENGTH):
        new = [text[span.length :] for span, text in zip(spans, texts, strict=True)]
        segments = [
            Segment(span, rows, logits_from=len(rows) - 1)
            for span, rows in zip(spans, new, strict=True)
        ]
        said = sampling.argmax(model.target.forward(segments, store).logits_NV)
        for span, rows, text, token in zip(spans, new, texts, said, strict=True):
            store.extend(span, len(rows))
            text.append(token)
    return texts


def _until_end(text: list[int], prompt: int, stop_ids: frozenset[int]) -> list[int]:
    ends = (place for place in range(prompt, len(text)) if text[place] in stop_ids)
    return text[: next(ends, len(text))]


def _shares(right_AK: Tensor) -> list[float]:
    return [round(share, 4) for share in right_AK.float().mean(0).tolist()]


def _percent(right_AK: Tensor) -> str:
    return ", ".join(f"{share:.0%}" for share in _shares(right_AK))
