"""A short run in one of several processes; `test_distributed.py` starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from forerun.models.hub import load
from forerun.train.recipe import Recipe
from forerun.train.trainer import Step, Trainer
from training import text


class Silent:
    def say(self, sentence: str) -> None: ...

    def step(self, step: Step) -> None: ...


KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 200, "options": {"taps": [1, 2, 3]}},
    "medusa2": {
        "draft_vocab": "all",
        "trials": 1,
        "trial_prompts": 1,
        "trial_tokens": 4,
        "options": {"rank": 4, "max_kl": 1e9},
    },
}


def main(model: str, folder: str, kind: str = "eagle3") -> None:
    examples = [text((4, 12 + i), length=12 + i, seed=i) for i in range(12)]
    common = {"tokens": 1000, "batch": 4, "trials": 0, "precision": "float32"}
    recipe = Recipe(**{"kind": kind, **common, **KINDS[kind]})
    loaded = load(model, "float32", "cpu")
    Trainer(recipe, loaded, examples[:10], examples[10:], Path(folder), Silent()).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
