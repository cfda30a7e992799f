"""The plan beside fixed settings: what is compared, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.settings import GRIDS, Contest, Table, show
from forerun.core import SamplingParams
from forerun.drafters.spec import parse
from forerun.tune.bench import PLAIN
from tiny import tiny_llama


def table() -> Table:
    seconds = {
        PLAIN: [4.0, 4.0, 4.0],
        "plan": [2.0, 2.0, 2.0],
        "other": [4.0, 4.0, 1.0],
        "a": [1.0, 4.0, 4.0],
        "b": [4.0, 2.0, 2.0],
    }
    return Table("chat", 1, ["plan", "other"], ["a", "b"], tokens=12, seconds=seconds)


def test_the_best_setting_is_known_only_afterwards() -> None:
    """In each group, whoever tunes by hand has the setting that is best in the others."""
    found = table()
    assert found.speedup("plan") == 2.0
    assert found.best() == "b"
    # In the first group b, which needs 4 in the others, not a; then a, which needs 5, not b.
    assert found.chosen() == 4.0 + 4.0 + 4.0


def test_one_against_another() -> None:
    ratio, error = table().against("plan", "other")
    assert ratio == pytest.approx(2 ** (1 / 3))
    assert error == pytest.approx(2 / 3 * 0.6931, rel=1e-3)


def test_grids_are_of_one_drafter() -> None:
    for draft, settings in GRIDS.values():
        (ours,) = parse(draft)
        assert {(each.name, each.argument) for spec in settings for each in parse(spec)} == {
            (ours.name, ours.argument)
        }
        assert len(set(settings)) == len(settings)


def test_all_answer_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6)
    contest = Contest(model, ["ngram", "suffix"], ["ngram:k=1"], params)
    found = contest.run("chat", batch=2, prompts=3)
    assert {spec: len(each) for spec, each in found.seconds.items()} == dict.fromkeys(
        (PLAIN, "ngram", "suffix", "ngram:k=1!"), 2
    )
    assert found.answers == found.same == 9
    show(found)
    printed = capsys.readouterr().out
    assert "9/9 texts same" in printed
    assert "suffix over ngram" in printed
    assert "suffix over the best fixed (ngram:k=1!)" in printed
