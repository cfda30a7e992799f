"""Where a run stands: its folder, what it writes there, and how it is taken up again.

    DIR/                   the best draft so far, for --draft, inspect and export: that of the trial
                           with the most accepted tokens a pass; without trials, the last one
    DIR/training.json      how it came about: command, versions, seed, data, recipe, curve, trials
    DIR/training/          recipe.toml; until the run is over, the last state, state.pt, to go
                           on from, what each process carried then (shuffled rows) and, if they are
                           kept, the hidden states

Files are replaced as a whole, so that a kill leaves the old or the new ones.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.home import written_whole
from forerun.train.recipe import Recipe

STATE, RECIPE, PROVENANCE = "training/state.pt", "training/recipe.toml", "training.json"
STATES = "training/states-*.bin"
CARRIED = "training/carried-{step}-{rank}.pt"  # that of the state's step is always there


@dataclass(slots=True)
class Progress:
    """How far a run is. steps: of the whole run, fixed before the first. curve: loss of each step.
    stopped: the step of a trial that ended the run before, and what it found.

    trials: of the draft as it was then. shapes: trials of the best draft at the end, by spec.
    """

    steps: int
    step: int = 0
    seconds: float = 0.0
    curve: list[float] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    stopped: dict[str, Any] | None = None
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.stopped is not None or self.step == self.steps

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the largest acceptance length, of equal ones the last.

        A draft of one kind goes on costing the same while it learns, so that this is also the
        fastest one, without the noise of clocks: these also decide how often the engine drafts, and
        thereby the tokens of a pass.
        """
        trials = self.trials
        return max(
            trials, key=lambda trial: (trial["acceptance_length"], trial["step"]), default=None
        )

    @property
    def spec(self) -> str | None:
        """With which the best draft was fastest."""
        shapes = self.shapes
        return max(shapes, key=lambda spec: float(shapes[spec]["speedup"]), default=None)


class Folder:
    """The folder of a run, for one recipe on one model and data."""

    def __init__(self, path: Path, identity: Mapping[str, Any], recipe: Recipe) -> None:
        self.path = path
        self._identity = {**identity, "recipe": recipe.model_dump(mode="json")}
        self._recipe = recipe

    def begin(self) -> tuple[Progress, Mapping[str, Any]] | None:
        """What an unfinished run of the same recipe left, parameters and optimiser beside it.

        Raises `ConfigError` if the folder holds anything else.
        """
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        provenance = self.path / PROVENANCE
        if not provenance.exists():
            raise ConfigError(f"{self.path} holds something else; name a new folder")
        known = json.loads(provenance.read_text(encoding="utf-8"))
        if different := _difference(known["identity"], json.loads(json.dumps(self._identity))):
            raise ConfigError(
                f"{self.path} holds a run with another {different}; name a new folder, or give the "
                "same again to go on with it"
            )
        if known["finished"]:
            raise ConfigError(f"the run in {self.path} is finished; name a new folder")
        if not (self.path / STATE).exists():
            return None
        state = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return Progress(**state["progress"]), state["tensors"]

    def carried(self, step: int, rank: int) -> list[Tensor]:
        """What a process carried when the state of a step was saved; nothing, where there was no
        such process."""
        file = self.path / CARRIED.format(step=step, rank=rank)
        if not file.exists():
            return []
        tensors: list[Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return tensors

    def carry(self, step: int, rank: int, tensors: Sequence[Tensor]) -> None:
        """Write what a process carries; all do so before the state of that step is saved."""
        if tensors:
            with written_whole(self.path / CARRIED.format(step=step, rank=rank)) as fresh:
                torch.save([tensor.clone() for tensor in tensors], fresh)

    def claim(self, facts: Mapping[str, Any]) -> None:
        """Make the folder this run's."""
        for left in self.path.glob("**/.new-*"):  # a kill interrupted it being written
            shutil.rmtree(left)
        self._record({**facts, "finished": False})

    def save(
        self,
        progress: Progress,
        tensors: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write all files but the draft anew."""
        if progress.over:
            (self.path / STATE).unlink(missing_ok=True)
            self.drop_states()
        else:
            state = {"progress": _plain(progress), "tensors": dict(tensors)}
            with written_whole(self.path / STATE) as fresh:
                torch.save(state, fresh)
        self._drop_carried(None if progress.over else progress.step)
        done = {
            "steps": progress.steps,
            "step": progress.step,
            "seconds": round(progress.seconds, 1),
            "spec": progress.spec,
            "best": progress.best and progress.best["step"],
            "shapes": progress.shapes,
            "trials": progress.trials,
            "stopped": progress.stopped,
            "curve": [round(loss, 5) for loss in progress.curve],
        }
        self._record({**facts, "finished": progress.over, **done})

    def _record(self, facts: Mapping[str, Any]) -> None:
        text = json.dumps({"identity": self._identity, **facts}, indent=2)
        for name, content in {RECIPE: self._recipe.toml(), PROVENANCE: text + "\n"}.items():
            with written_whole(self.path / name) as fresh:
                fresh.write_text(content, encoding="utf-8")

    @contextmanager
    def candidate(self, draft: Callable[[Path], None]) -> Iterator[Path]:
        """A folder that holds a draft while it is being tried. draft: writes it there."""
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".new-") as scratch:
            draft(Path(scratch))
            yield Path(scratch)

    def keep(self, candidate: Path) -> None:
        """Make it the draft of the run."""
        for file in sorted(candidate.iterdir()):
            file.replace(self.path / file.name)

    def drop_states(self) -> None:
        """Hidden states that were kept; a run that goes on computes them again."""
        for file in self.path.glob(STATES):
            file.unlink(missing_ok=True)

    def _drop_carried(self, but: int | None) -> None:
        """What was carried at other steps than this one."""
        kept = set(self.path.glob(CARRIED.format(step=but, rank="*")))
        for file in set(self.path.glob(CARRIED.format(step="*", rank="*"))) - kept:
            file.unlink()


def _plain(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in Progress.__slots__}


def _difference(known: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """The first thing that differs, as a user would call it."""
    for name in {**known, **own}:
        a, b = known.get(name), own.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if inner := _difference(a, b):
                return inner
        elif a != b:
            return f"{name} ({a}, not {b})"
    return None
