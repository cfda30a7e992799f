"""A short run in one of several processes; `test_distributed.py` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.models.hub import load
from forerun.train.recipe import Recipe
from forerun.train.trainer import Step, Trainer
from training import text


class Silent:
    def say(self, sentence: str) -> None: ...

    def step(self, step: Step) -> None: ...


def main(model: str, folder: str, tokens: int = 1000) -> None:
    examples = [text((4, 12 + i), length=12 + i, seed=i) for i in range(12)]
    recipe = Recipe(
        kind="eagle3",
        tokens=tokens,
        batch=4,
        trials=0,
        precision="float32",
        draft_vocab=200,
        options={"taps": [1, 2, 3]},
    )
    loaded = load(model, "float32", "cpu")
    Trainer(recipe, loaded, examples[:10], examples[10:], Path(folder), Silent()).run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
