"""What the commands that train share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.cli.progress import Line
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.train.trainer import Step

KINDS = {
    "eagle3": "EAGLE-3: a layer that runs ahead on the model's hidden states; the best of them.",
    "medusa": "Medusa-1: heads that each guess one token further; the quickest to train.",
    "dflash": "DFlash: a small network that fills a whole block at once.",
    "medusa2": "Medusa-2: heads and the model itself, which is changed; held to a bound.",
}


def given(budget: str | None, tokens: int | None, seed: int | None) -> dict[str, Any]:
    """What the command line says of a recipe."""
    from forerun.train.recipe import seconds

    if budget is not None and tokens is not None:
        raise ConfigError("--budget and --tokens both say how long to train; give one of them")
    values: dict[str, Any] = {"tokens": tokens, "seed": seed}
    values["budget_seconds"] = None if budget is None else seconds(budget)
    return {name: value for name, value in values.items() if value is not None}


class Watch(Line):
    """Who watches a run: its steps on a line that changes, what it says on lines that stay."""

    def step(self, step: Step) -> None:
        if self.due or step.step == step.steps:
            self.show(_line(step))


def _line(step: Step) -> str:
    right = " ".join(f"{share:.2f}" for share in step.accuracy_P)
    left = round(step.seconds_left)
    return (
        f"step {step.step}/{step.steps}  loss {step.loss:.3f}  right {right}  "
        f"{step.tokens_per_second:.0f} tok/s  {left // 60}:{left % 60:02d} left"
    )
