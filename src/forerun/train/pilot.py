"""A tenth of every kind's run, and what the whole of it would reach.

The tenth is the beginning of the whole run, not a short run of its own. So the trials of a kind,
behind the warm-up, all stand at about the same learning rate, and one law holds for them; those of
a short run would also rise with its sinking rate, which looks like fast learning and is none
(Hoffmann et al. 2022, arXiv 2203.15556, section 3: the schedule must belong to the steps that are
compared). And the run that is chosen goes on where it stopped. What the rate's sinking wins at the
end of a whole run is not in the forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.models.hub import LoadedModel
from forerun.train import corpus
from forerun.train.evaluate import Trial, evaluate, questions
from forerun.train.examples import load, split
from forerun.train.forecast import Point, Range, forecast, learned
from forerun.train.recipe import Recipe
from forerun.train.state import Progress
from forerun.train.trainer import Report, Step, prepare

TRIED_AFTER = (0.03, 0.05, 0.07, 0.1)  # of the whole run; as a rule, the first ends the warm-up
CORPUS = "corpus"


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a kind reaches in the pilot, and what it would in the whole run.

    step: where the pilot stopped, of how many steps. tokens_per_second: while learning; None where
    nothing was left to learn. length, speedup: of the last trial.
    """

    kind: str
    spec: str
    step: int
    steps: int
    tokens_per_second: float | None
    megabytes: float
    length: float
    speedup: float
    lengths: Range
    speedups: Range


def run(
    recipe: Recipe,
    model: LoadedModel,
    data: Sequence[Path],
    folder: Path,
    report: Report,
    command: Sequence[str] = (),
) -> Prospect:
    """Train the first tenth, or take up what an earlier pilot left of it.

    Raises `ConfigError` where that is too short for two trials.
    """
    watch = _Watch(recipe.kind, report)
    trainer = prepare(recipe, model, data, folder, watch, command)
    progress = trainer.run(TRIED_AFTER)
    trainer.folder.drop_states()
    trials = [trial for trial in progress.trials if trial["step"]]
    if len(trials) < 2:
        raise ConfigError(
            f"a tenth of the budget is {progress.step} steps of {recipe.kind}, too few to see "
            "where they lead; give more"
        )
    last = trials[-1]
    lengths = _forecast(recipe, progress, trials, trainer.objective.ahead)
    return Prospect(
        recipe.kind,
        trainer.objective.spec(folder),
        progress.step,
        progress.steps,
        watch.tokens_per_second,
        _megabytes(folder),
        last["acceptance_length"],
        last["speedup"],
        lengths,
        lengths / _cost(last),
    )


def count(
    recipe: Recipe, model: LoadedModel, data: Sequence[Path], file: Path, report: Report
) -> Prospect:
    """Count the texts that `recipe` trains on as a corpus, and try it on its held-out prompts."""
    found = load(data, model.tokenizer, model.target.info.max_length)
    learned, held = split(found, recipe.held_out, recipe.seed)
    corpus.train(learned, model, file)
    spec = f"{CORPUS}:{file}"
    trial: Trial = evaluate(
        model, [spec], questions(held, recipe.trial_prompts), recipe.trial_tokens
    )[spec]
    report.say(f"{CORPUS}: {trial}")
    length, speedup = trial.acceptance_length, trial.speedup
    return Prospect(
        CORPUS,
        spec,
        1,
        1,
        None,
        file.stat().st_size / 1e6,
        length,
        speedup,
        Range(length, length, length),
        Range(speedup, speedup, speedup),
    )


def best(prospects: Sequence[Prospect]) -> Prospect:
    """The one that is likely to be fastest."""
    return max(prospects, key=lambda prospect: prospect.speedups.likely)


def rivals(chosen: Prospect, prospects: Sequence[Prospect]) -> list[Prospect]:
    """Others that may be faster than the chosen one is likely to be."""
    likely = chosen.speedups.likely
    return [p for p in prospects if p is not chosen and p.speedups.high >= likely]


def _forecast(
    recipe: Recipe, progress: Progress, trials: Sequence[dict[str, Any]], ahead: int
) -> Range:
    warm = recipe.warm(progress.steps)
    points = [
        Point(learned(trial["step"], warm), trial["acceptance_length"], _drafts(trial))
        for trial in trials
    ]
    return forecast(points, ahead, learned(progress.steps, warm))


def _drafts(trial: dict[str, Any]) -> float:
    """About how many drafts were checked."""
    passes = float(trial["output_tokens"] / trial["tokens_per_pass"])
    return max(1.0, _drafted(trial) * passes)


def _drafted(trial: dict[str, Any]) -> float:
    """Share of the passes that checked a draft: accepted tokens over passes, and over drafts."""
    per_draft, per_pass = trial["acceptance_length"] - 1, trial["tokens_per_pass"] - 1
    return min(1.0, float(per_pass / per_draft)) if per_draft > 0 else 1.0


def _cost(trial: dict[str, Any]) -> float:
    """What a pass with a draft takes, drafting included, in passes of plain decoding."""
    mean = trial["tokens_per_pass"] / trial["speedup"]
    return float(max(1.0, 1 + (mean - 1) / max(_drafted(trial), 0.1)))


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


class _Watch:
    """Says whose run it is, and remembers how fast it was."""

    def __init__(self, kind: str, report: Report) -> None:
        self._kind, self._report = kind, report
        self.tokens_per_second: float | None = None

    def say(self, sentence: str) -> None:
        begins = sentence.startswith(self._kind)
        self._report.say(sentence if begins else f"{self._kind}: {sentence}")

    def step(self, step: Step) -> None:
        self.tokens_per_second = step.tokens_per_second
        self._report.step(step)
