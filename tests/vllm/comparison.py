"""What is compared of two engines that ran the same draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from engines import Answer, Tokens, acceptance_length
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment


@dataclass(frozen=True)
class Noise:
    """How far bf16 alone moves the gap between two logits.

    logits: by which each token of our answers was chosen, [T, V] per prompt.
    bound: twice the largest distance between a top-2 gap in bf16 and the same gap in float32, over
    all tokens of all answers. Two bf16 engines are each that far from the truth at most, so where
    they choose differently, the gap of either is within the bound.
    """

    logits: list[Tensor]
    bound: float

    @classmethod
    def measure(
        cls,
        model: LoadedModel,
        exact: LoadedModel,
        prompts: Sequence[Tokens],
        texts: Sequence[Tokens],
    ) -> Noise:
        logits, largest = [], 0.0
        for prompt, text in zip(prompts, texts, strict=True):
            rough_TV, exact_TV = (_logits(each, prompt, text) for each in (model, exact))
            top_T2 = rough_TV.topk(2).indices
            moved_T2 = rough_TV.gather(1, top_T2) - exact_TV.gather(1, top_T2)
            largest = max(largest, float((moved_T2[:, 0] - moved_T2[:, 1]).abs().max()))
            logits.append(rough_TV)
        return cls(logits, 2 * largest)


def _logits(model: LoadedModel, prompt: Tokens, text: Tokens) -> Tensor:
    """By which each token of a text was chosen, [T, V]."""
    tokens = [*prompt, *text]
    store = model.target.new_store(len(tokens))
    span = store.open()
    store.reserve(span, len(tokens))
    segment = Segment(span, tokens[:-1], logits_from=len(prompt) - 1)
    return model.target.forward([segment], store).logits_NV


@dataclass(frozen=True)
class Parting:
    """Where two texts part: place in the answer, and how much our target prefers our token."""

    prompt: int
    place: int
    gap: float


@dataclass(frozen=True)
class Comparison:
    """One draft in both engines.

    name: its family, and where it is from. ours: what forerun writes by itself. recited: forerun
    on the text that vLLM wrote; spoilt: the same with every tap one layer too low.
    """

    name: str
    vllm: list[Answer]
    recited: list[Answer]
    spoilt: list[Answer]
    ours: list[Answer]
    noise: Noise

    @property
    def partings(self) -> list[Parting]:
        found = []
        for prompt, (ours, theirs) in enumerate(zip(self.ours, self.vllm, strict=True)):
            pairs = zip(ours.tokens, theirs.tokens, strict=True)
            place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if place < ours.end:
                logits_V = self.noise.logits[prompt][place]
                gap = logits_V[ours.tokens[place]] - logits_V[theirs.tokens[place]]
                found.append(Parting(prompt, place, float(gap)))
        return found

    @property
    def summary(self) -> str:
        vllm, recited, spoilt, ours = map(
            acceptance_length, (self.vllm, self.recited, self.spoilt, self.ours)
        )
        gap = max((parting.gap for parting in self.partings), default=0.0)
        same = len(self.ours) - len(self.partings)
        return (
            f"{self.name}: acceptance length on vLLM's text {vllm:.3f} in vLLM, {recited:.3f} in "
            f"forerun ({recited / vllm - 1:+.2%}), {spoilt:.3f} with shifted taps; on its own text "
            f"{ours:.3f} in forerun; same text {same}/{len(self.ours)}, largest gap where they "
            f"part {gap:.3f} (noise {self.noise.bound:.3f})"
        )
