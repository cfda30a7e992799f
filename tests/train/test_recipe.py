from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.train.objectives.eagle import Eagle3Objective, EagleOptions
from forerun.train.recipe import Recipe, make_recipe, read_toml, seconds


def made(file: dict[str, Any] | None = None, **given: Any) -> Recipe:
    return make_recipe("eagle3", Eagle3Objective.defaults, EagleOptions, file or {}, given)


def test_rates_rise_and_sink() -> None:
    recipe = made(tokens=1, lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=0.001)


def test_wsd_stays_before_it_sinks() -> None:
    recipe = made(tokens=1, lr=1.0, warmup=0.1, final_lr=0.0, schedule="wsd", decay=0.2)
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[10:81] == [1] * 71
    assert rates[90] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.05)


def test_a_run_of_one_step_has_a_rate() -> None:
    assert made(tokens=1, lr=1.0).rate(0, 1) == 1


def test_defaults_a_file_and_the_command_line_in_this_order() -> None:
    assert made().lr == 1.5e-3
    assert made().budget_seconds == 600
    assert made({"lr": 1e-4}).lr == 1e-4
    assert made({"lr": 1e-4, "seed": 3}, seed=5).seed == 5
    assert made({"budget_seconds": 60.0}, tokens=9).tokens == 9
    assert made({"options": {"unroll": 5}}).options["unroll"] == 5
    assert made().options["unroll"] == 3


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"kind": "medusa"}, "the recipe is for medusa, not eagle3"),
        ({"rate": 1}, "recipe has no 'rate'"),
        ({"options": {"unrol": 2}}, "eagle3 has no 'unrol'; did you mean 'unroll'?"),
        ({"options": 3}, r"write \[options\]"),
        ({"batch": 0}, "recipe: batch: "),
        ({"tokens": 5, "budget_seconds": 5}, "either a budget of time or a number of tokens"),
    ],
)
def test_what_is_wrong_is_said(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(file)


def test_it_comes_back_from_toml(tmp_path: Path) -> None:
    recipe = made({"options": {"taps": [1, 2, 3], "train_head": True}}, seed=7)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.toml())
    again = made(read_toml(file))
    assert again.model_copy(update={"options": {}}) == recipe.model_copy(update={"options": {}})
    assert EagleOptions(**again.options) == EagleOptions(**recipe.options)


def test_a_full_vocabulary_comes_back_too(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(made(draft_vocab="all").toml())
    assert made(read_toml(file)).draft_vocab == "all"


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(file)
    file.write_text("lr = = 3")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_toml(file)


def test_times() -> None:
    assert [seconds(text) for text in ("90s", "10m", "1.5h")] == [90, 600, 5400]
    for wrong in ("10", "m", "0s", "-5m", "1..5h"):
        with pytest.raises(ConfigError, match="write a time"):
            seconds(wrong)
