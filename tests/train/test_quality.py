from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch import Tensor

from forerun.models.hub import LoadedModel
from forerun.models.target import Segment
from forerun.train.examples import Example
from forerun.train.quality import Quality, Yardstick
from tiny import tiny_llama
from training import texts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("models")
    return tiny_llama(folder / "one", seed=1), tiny_llama(folder / "other", seed=2)


def measured(original: LoadedModel, changed: LoadedModel, bound: float = 1.0) -> Quality:
    yardstick = Yardstick(original.target, texts(), bound)  # type: ignore[arg-type]
    return yardstick(changed.target)  # type: ignore[arg-type]


def laws(model: LoadedModel, example: Example) -> Tensor:
    """Of the next token behind every token, [R, V]."""
    target = model.target
    store = target.new_store(64)
    span = store.open()
    store.reserve(span, len(example.tokens))
    return target.forward([Segment(span, example.tokens)], store).logits_NV.double().softmax(-1)


def test_the_figures_are_those_of_a_literal_computation(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    original, changed = pair
    surprise = kl = 0.0
    same = count = 0
    for example in texts():
        was, now = laws(original, example), laws(changed, example)
        for place in range(1, len(example.tokens)):
            if not example.supervised[place]:
                continue
            p, q = was[place - 1].tolist(), now[place - 1].tolist()
            surprise -= math.log(q[example.tokens[place]])
            kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            same += p.index(max(p)) == q.index(max(q))
            count += 1
    found = measured(original, changed)
    assert found.tokens == count == 7 + 6 + 9 + 1
    assert found.perplexity == pytest.approx(math.exp(surprise / count), rel=1e-4)
    assert found.kl == pytest.approx(kl / count, rel=1e-4)
    assert found.agreement == same / count
    assert measured(changed, original).kl != pytest.approx(kl / count, rel=1e-2), "one direction"


def test_a_model_is_like_itself(pair: tuple[LoadedModel, LoadedModel]) -> None:
    found = measured(pair[0], pair[0])
    assert (found.kl, found.agreement) == (0.0, 1.0)
    assert not found.passed


def test_the_bound(pair: tuple[LoadedModel, LoadedModel]) -> None:
    kl = measured(*pair).kl
    assert measured(*pair, bound=0.9 * kl).passed
    assert not measured(*pair, bound=1.1 * kl).passed
    assert Quality(1.0, math.nan, 1.0, 1, 1.0).passed, "what is no number is no proof"
