"""Where the time of a training step goes, and what the loop costs beside the bare passes.

    python -m bench.training eagle3 --steps 5      # or dflash, medusa, ...

Random texts on SmolLM2. `bare` is forward and backward of the loss over states that have been
captured already; `loop` is a whole step of the trainer with kept states: the same and everything
else. Both are measured in turn, in one run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from forerun.models import hub
from forerun.train.capture import Capture
from forerun.train.examples import Example
from forerun.train.objectives import OBJECTIVES
from forerun.train.recipe import make_recipe
from forerun.train.trainer import Step, Trainer

LENGTH, PROMPT, TEXTS, TOKENS = 256, 70, 6, 8000


class _Silent:
    def say(self, sentence: str) -> None: ...

    def step(self, step: Step) -> None: ...


class _Clock:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of a training step, by parts.")
    parser.add_argument("kind", choices=list(OBJECTIVES))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    noise = torch.Generator().manual_seed(0)
    texts = [
        Example(
            torch.randint(100, TOKENS, (LENGTH,), generator=noise).tolist(),
            [place >= PROMPT for place in range(LENGTH)],
            str(number),
        )
        for number in range(TEXTS)
    ]
    model = hub.load(arguments.model)
    made = OBJECTIVES[arguments.kind]
    given = {"tokens": 1, "cache": True, "trials": 0, "batch": TEXTS, "precision": "bfloat16"}
    recipe = make_recipe(arguments.kind, made.defaults, made.settings, {}, given)
    seconds: dict[str, list[float]] = {"capture": [], "forward": [], "backward": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, model, texts, texts, Path(folder) / "run", _Silent())
        trainer._prepare()
        objective = trainer.objective
        capture = Capture(objective.target, objective.taps)
        for number in range(arguments.steps + 1):
            clock = _Clock()
            batch = capture(texts)
            seconds["capture"].append(clock())
            with torch.autocast(batch.tokens_BR.device.type, torch.bfloat16):
                loss = objective.loss(batch, torch.Generator().manual_seed(number))
            seconds["forward"].append(clock())
            loss.total.backward()
            seconds["backward"].append(clock())
            trainer._optimizer.zero_grad()
            clock()
            trainer._step(number, arguments.steps + 1)
            seconds["loop"].append(clock())
    middle = {name: median(each[1:]) for name, each in seconds.items()}  # the first warms up
    bare = middle["forward"] + middle["backward"]
    tokens = LENGTH * TEXTS
    for name, each in middle.items():
        print(f"{name:10} {1000 * each:7.0f} ms")
    print(f"bare       {1000 * bare:7.0f} ms  {tokens / bare:7.0f} tok/s")
    speed, share = tokens / middle["loop"], bare / middle["loop"]
    print(f"loop with kept states: {speed:.0f} tok/s, {share:.2f} of bare")
    fresh = middle["loop"] + middle["capture"]
    print(f"loop with states computed anew: {tokens / fresh:.0f} tok/s")


if __name__ == "__main__":
    main()
