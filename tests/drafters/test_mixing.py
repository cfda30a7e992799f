from __future__ import annotations

import random

import pytest

from forerun.drafters.mixing import NAMED, OTHERS, SILENT, Mixer, score

ALONE, DOUBTED, AGREED = NAMED + 3 * SILENT, NAMED + 3 * OTHERS, NAMED + 3 * NAMED
CONTRADICTED = OTHERS + 3 * NAMED


def raw(mixer: Mixer, pattern: int, *beliefs: float) -> float:
    return mixer[pattern].raw([*(score(b) if b else 0.0 for b in beliefs), 1.0])


def test_who_speaks_alone_is_believed() -> None:
    mixer = Mixer(2)
    assert raw(mixer, ALONE, 0.3, 0) == pytest.approx(0.3)
    assert raw(mixer, OTHERS + 3 * SILENT, 0.7, 0) == pytest.approx(0.7), "what it leaves over"


def test_doubt_lowers_and_agreement_keeps_a_score() -> None:
    mixer = Mixer(2)
    alone, doubted, agreed = (raw(mixer, p, 0.3, 0.3) for p in (ALONE, DOUBTED, AGREED))
    assert doubted < alone == pytest.approx(agreed)


@pytest.mark.parametrize("right", [True, False])
def test_nothing_breaks_where_all_goes_one_way(right: bool) -> None:
    mixer = Mixer(2)
    inputs = [score(0.0), score(1.0), 1.0]
    for _ in range(5000):
        likely = mixer[AGREED].raw(inputs)
        assert 0 < likely < 1e14
        mixer[AGREED].learn(inputs, likely / (likely + 0.1), right)
    likely = mixer[AGREED].raw(inputs)
    assert abs(likely / (likely + 0.1) - right) < 0.01


def test_a_source_that_is_always_wrong_loses_its_weight() -> None:
    """Two sources name two tokens; the first one's is right in 6 of 10 cases, the other's never."""
    dice = random.Random(1)
    mixer = Mixer(2)
    patterns = [DOUBTED, CONTRADICTED, OTHERS + 3 * OTHERS]
    inputs = [[score(0.6), score(0.4), 1.0], [score(0.4), score(0.6), 1.0], [score(0.4)] * 2 + [1]]

    def chances() -> list[float]:
        scores = [mixer[p].raw(each) for p, each in zip(patterns, inputs, strict=True)]
        return [each / sum(scores) for each in scores]

    good, bad, _ = chances()
    assert good == pytest.approx(bad), "equals at first"
    for _ in range(150):
        found = 0 if dice.random() < 0.6 else 2
        for i, chance in enumerate(chances()):
            mixer[patterns[i]].learn(inputs[i], chance, i == found)
    good, bad, _ = chances()
    assert bad < 0.03
    assert good == pytest.approx(0.6, abs=0.1)


def test_old_decisions_fade() -> None:
    mixer = Mixer(1)
    inputs = [score(0.5), 1.0]
    for right in (True, False):
        for _ in range(5000):
            likely = mixer[NAMED].raw(inputs)
            mixer[NAMED].learn(inputs, likely / (likely + 0.5), right)
    assert mixer[NAMED].raw(inputs) < 0.05
