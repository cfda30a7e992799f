"""The loop: batches of texts through target and draft, one step after the other.

Everything that a step does follows from the recipe and the number of the step, so that a run that
was killed goes on as if nothing had happened. It runs in one process, or in several under
`torchrun` or `accelerate launch` (DDP, FSDP): each takes its share of every batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from forerun.errors import ConfigError
from forerun.models.hub import DTYPES, LoadedModel, multiplies_bf16
from forerun.train import earlier, vocabulary
from forerun.train.capture import Capture, States
from forerun.train.evaluate import Trial, evaluate, questions
from forerun.train.examples import Example, data_hash, load, split
from forerun.train.objectives import OBJECTIVES, Loss, Objective
from forerun.train.processes import Processes
from forerun.train.recipe import Recipe, find
from forerun.train.state import Folder, Progress
from forerun.train.vocabulary import Vocabulary
from forerun.tune.meta import machine, software

MEASURED = 6  # steps whose speed decides how many there will be; the first is not counted
BETAS = (0.9, 0.95)
SAVES = 20  # times that the state is saved in a run
_MARK = "network."  # before the names of its parameters, whatever it is wrapped in
SHAPES = 2  # trials that those of all shapes at the end take as long as
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step reports. accuracy_P: share of predictions that were right, per position, since
    the last report that was shown."""

    step: int
    steps: int
    loss: float
    accuracy_P: list[float]
    tokens_per_second: float
    seconds_left: float


class Report(Protocol):
    """Who watches a run."""

    def say(self, sentence: str) -> None: ...

    def step(self, step: Step) -> None: ...


class _Trained(nn.Module):
    """What is wrapped for several processes: a pass is a whole loss."""

    def __init__(self, objective: Objective, precision: torch.dtype) -> None:
        super().__init__()
        self.network = objective.network
        self._objective = [objective]  # not a submodule, should it ever be one
        self._precision = precision

    def forward(self, examples: Sequence[Example], capture: Capture, seed: int) -> Loss:
        (objective,) = self._objective
        batch = capture(examples)
        device = batch.tokens_BR.device.type
        half = self._precision is not torch.float32
        with torch.autocast(device, self._precision, enabled=half):
            return objective.loss(batch, torch.Generator().manual_seed(seed))


class Trainer:
    """One run. Raises `ConfigError` for a folder that holds something else."""

    def __init__(
        self,
        recipe: Recipe,
        model: LoadedModel,
        train: Sequence[Example],
        held: Sequence[Example],
        folder: Path,
        report: Report,
        command: Sequence[str] = (),
    ) -> None:
        self.recipe, self.model, self.train = recipe, model, train
        self._report = report
        self._processes = Processes(model.target.info.device)
        if recipe.batch < self._processes.count:
            raise ConfigError(
                f"{self._processes.count} processes cannot share {recipe.batch} texts a step; "
                "raise batch"
            )
        identity = {"model": model.name, "data": data_hash([*train, *held])}
        self.folder = Folder(folder, identity, recipe)
        self._held = held
        self._questions = questions(held, recipe.trial_prompts)
        self.objective = self._make_objective()
        self._facts = {"command": list(command), "versions": software(), "machine": machine()}

    def run(self, tried_after: Sequence[float] = ()) -> Progress:
        """Train to the end; what came of it.

        tried_after: instead, try the draft after these shares of the steps, and leave the run
        behind the last of them, so that it can be taken up.
        """
        begun = time.monotonic()
        found = self.folder.begin()
        self._processes.wait()  # nobody writes before all have looked
        self._prepare()
        if found:
            progress, tensors = found
            self._restore(tensors)
            self.objective.carry(self.folder.carried(progress.step, self._processes.rank))
            self._say(f"going on behind step {progress.step} of {progress.steps}")
        else:
            if self._processes.main:
                self.folder.claim(self._facts)
            progress = self._plan(begun)
        end = progress.steps
        trials = _evenly(self.recipe.trials, end)
        if tried_after:
            trials = {max(1, round(share * progress.steps)) for share in tried_after}
            end = max(trials)
        saves = _evenly(SAVES, progress.steps) | trials
        before = progress.seconds
        begin = time.monotonic()
        window = _Window()
        while progress.step < end and not progress.over:
            loss = self._step(progress.step, progress.steps)
            if not math.isfinite(loss.mean):
                raise ConfigError(
                    f"the loss is {loss.mean} at step {progress.step}; lower lr in the recipe and "
                    f"train anew: {self.folder.path} holds the best draft so far"
                )
            window.add(loss)
            progress.curve.append(loss.mean)
            progress.step += 1
            progress.seconds = before + time.monotonic() - begin
            self._tell(window, progress, end)
            learned = time.monotonic()
            if progress.step in trials:
                self._try(progress)
            if progress.over and progress.trials:
                self._choose_shape(progress)
            if progress.step in saves:
                self._save(progress)
            window.skip(time.monotonic() - learned)
        return progress

    # ---- before the first step ------------------------------------------------------------------

    def _make_objective(self) -> Objective:
        recipe, info = self.recipe, self.model.target.info
        made: type[Objective] = find(recipe.kind, OBJECTIVES)
        start = earlier.read(recipe.kind, recipe.start, info.name) if recipe.start else None
        kept = self._vocabulary(earlier.proposed(start) if start else None)
        if kept.reduced:
            self._say(
                f"draft vocabulary: {len(kept)} of {info.vocab_size} tokens, "
                f"{kept.coverage:.1%} of what is learned from"
            )
        noise = torch.Generator().manual_seed(recipe.seed)
        if made.changes_model and not recipe.trials:
            raise ConfigError(
                f"{recipe.kind} is held to its bound in trials; set trials to 1 or more"
            )
        objective = made(made.settings(**recipe.options), self.model, kept, noise)
        if start:
            earlier.take_over(objective.network, start, str(recipe.start))
        trained = [p for p in objective.network.parameters() if p.requires_grad]
        self._say(
            f"{recipe.kind}: {sum(p.numel() for p in trained) / 1e6:.1f} million parameters, "
            f"reading boundaries {', '.join(map(str, objective.taps)) or 'none'} of {info.layers}"
        )
        return objective

    def _vocabulary(self, known_U: Tensor | None) -> Vocabulary:
        """What the draft may propose. known_U: what the draft that it begins with does; it may
        propose more now, never less."""
        recipe, size = self.recipe, self.model.target.info.vocab_size
        wanted = size if recipe.draft_vocab == "all" else recipe.draft_vocab
        if known_U is None and (recipe.start or wanted >= size):
            return vocabulary.full(size)
        counts_V = vocabulary.count(self.train, size)
        if known_U is not None:
            if not len(known_U) < wanted < size:  # a part of the tokens stays one
                return vocabulary.given(known_U, counts_V)
            always = frozenset(known_U.tolist())
        else:
            marks = map(self.model.tokenizer.token_id, self.model.tokenizer.special_tokens.values())
            always = vocabulary.controls(list(marks), self.model.stop_ids)
        return vocabulary.choose(counts_V, wanted, always)

    def _prepare(self) -> None:
        objective = self.objective
        precision = self._precision()
        self._say(f"products in {str(precision).removeprefix('torch.')}, weights in float32")
        module = _Trained(objective, precision)
        self._module = self._processes.wrap(module, self.recipe.shard)
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._groups(), self.recipe.lr, BETAS, weight_decay=self.recipe.weight_decay, fused=True
        )
        self._capture = Capture(objective.target, objective.taps, self._states())

    def _groups(self) -> list[dict[str, Any]]:
        """The parameters of each part of the network."""
        named = [(n, p) for n, p in self._module.named_parameters() if p.requires_grad]
        return [
            {"params": [p for name, p in named if _own_name(name).startswith(part)]}
            for part in self.objective.parts
        ]

    def _states(self) -> States | None:
        """Where hidden states are kept, if the recipe wants so; each process has a file."""
        if not self.recipe.cache:
            return None
        info, boundaries = self.model.target.info, len(self.objective.taps) + 1
        size = States.bytes(self.train, boundaries, info)
        self._say(f"hidden states are kept on disk while the run lasts: {size / 1e9:.2f} GB")
        file = self.folder.path / f"training/states-{self._processes.rank}.bin"
        return States(file, self.train, boundaries, info)

    def _precision(self) -> torch.dtype:
        if self.recipe.precision != "auto":
            return DTYPES[self.recipe.precision]
        half = multiplies_bf16(self.model.target.info.device)
        return torch.bfloat16 if half else torch.float32

    def _plan(self, begun: float) -> Progress:
        """Fix the number of steps: of the tokens, or of what the machine does in the time."""
        recipe, progress = self.recipe, Progress(steps=0)
        text = sum(len(example.tokens) for example in self.train) / len(self.train)
        trial_begun = time.monotonic()
        if recipe.trials:
            self._try(progress)
        trial = time.monotonic() - trial_begun
        if recipe.tokens is not None:
            progress.steps = max(1, round(recipe.tokens / (text * recipe.batch)))
        else:
            assert recipe.budget_seconds is not None
            until = begun + recipe.budget_seconds - (recipe.trials + SHAPES) * trial
            progress.steps = self._processes.agree(self._count_steps(until))
        rounds = progress.steps * recipe.batch / len(self.train)
        self._say(
            f"{progress.steps} steps of {recipe.batch} texts ({text:.0f} tokens each): every text "
            f"{rounds:.1f} times"
        )
        return progress

    def _count_steps(self, until: float) -> int:
        """How many steps fit until a time. Those of the first round take longer where hidden
        states are kept."""
        first = self._time_steps()
        later = self._time_steps() if self.recipe.cache else first
        left = until - time.monotonic()
        if left < 0:
            self._say("the budget is shorter than the trials of the draft; set trials = 0")
        round = len(self.train) / self.recipe.batch
        if left < round * first:
            return max(1, int(left / first))
        return int(round + (left - round * first) / later)

    def _time_steps(self) -> float:
        """Seconds of a step; nothing is learned in them."""
        begin = 0.0
        for number, texts in enumerate(self._batches(0, MEASURED + 1)):
            if number == 1:
                begin = time.monotonic()
            self.objective.done = max(0.0, (number - 0.5) / MEASURED)  # spread over the run
            self._backward(texts, number)
            nn.utils.clip_grad_norm_(self._trained, self.recipe.clip)
            self._optimizer.zero_grad()
        return (time.monotonic() - begin) / MEASURED

    # ---- a step ---------------------------------------------------------------------------------

    def _step(self, step: int, steps: int) -> _Sums:
        self.objective.done = step / steps
        rate = self.recipe.rate(step, steps)
        for group, part in zip(self._optimizer.param_groups, self.objective.parts, strict=True):
            group["lr"] = rate * self.objective.rate(part)
        (texts,) = self._batches(step, 1)
        sums = self._backward(texts, step)
        nn.utils.clip_grad_norm_(self._trained, self.recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sums

    def _backward(self, texts: Sequence[Example], step: int) -> _Sums:
        own = texts[self._processes.rank :: self._processes.count]
        seed = self.recipe.seed * 1_000_003 + step
        loss = Loss(*self._module(own, self._capture, seed))
        # Processes average their gradients; each stands for what it counted.
        tokens = torch.tensor(float(sum(len(text.tokens) for text in own)))
        sums = _Sums.of(loss, tokens.to(loss.total.device))
        sums = _Sums(self._processes.sum(sums.values), len(loss.loss_P))
        share = self._processes.count * loss.count / max(sums.count, 1.0)
        (loss.total * share).backward()
        return sums

    def _batches(self, first: int, count: int) -> Iterator[list[Example]]:
        """The texts of steps: every round goes through all of them in a new order."""
        size, texts = self.recipe.batch, len(self.train)
        orders: dict[int, list[int]] = {}
        for step in range(first, first + count):
            chosen = []
            for place in range(step * size, (step + 1) * size):
                round, index = divmod(place, texts)
                if round not in orders:
                    noise = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + round)
                    orders[round] = torch.randperm(texts, generator=noise).tolist()
                chosen.append(self.train[orders[round][index]])
            yield chosen

    # ---- between steps --------------------------------------------------------------------------

    def _tell(self, window: _Window, progress: Progress, end: int) -> None:
        if not self._processes.main:
            return
        step = Step(
            progress.step,
            end,
            window.loss,
            window.accuracy,
            window.tokens_per_second,
            (end - progress.step) * window.seconds_per_step,
        )
        self._report.step(step)

    def _try(self, progress: Progress) -> None:
        """Let the engine answer held-out prompts with the draft, and keep it if it is the best.

        Where that would leave a model that has changed more than it may, what is there stays, and
        the run is over.
        """
        weights = self._weights()
        if self._processes.main:
            with self._candidate(weights) as folder:
                model = self.objective.served(folder)
                found: dict[str, Any] = {"step": progress.step}
                if quality := self.objective.quality(model, self._held):
                    found["quality"] = quality.json()
                    self._say(f"step {progress.step}: {quality}")
                if quality and quality.passed:
                    progress.stopped = found
                    self._say("stopped, for the bound is passed; the best draft within it is kept")
                else:
                    spec = self.objective.spec(folder)
                    trial = self._evaluate(model, [spec])[spec]
                    progress.trials.append({**found, **trial.json()})
                    self._say(f"step {progress.step}: {trial}")
                    if progress.best is progress.trials[-1]:
                        self.folder.keep(folder)
        if self._processes.agree(int(progress.over)) and not progress.over:
            progress.stopped = {}

    def _choose_shape(self, progress: Progress) -> None:
        """Find out how the best draft is fastest here."""
        if not self._processes.main:
            return
        best, last = progress.best, progress.trials[-1]
        if best and best is not last:
            self._say(
                f"the draft of step {best['step']} is kept: accepted "
                f"{best['acceptance_length']:.2f} tokens a pass, the last one "
                f"{last['acceptance_length']:.2f}"
            )
        model = self.objective.served(self.folder.path)
        for spec, trial in self._evaluate(model, self.objective.specs(self.folder.path)).items():
            progress.shapes[spec] = trial.json()
            self._say(f"{spec}: {trial}")

    def _evaluate(self, model: LoadedModel, specs: Sequence[str]) -> dict[str, Trial]:
        return evaluate(model, specs, self._questions, self.recipe.trial_tokens)

    def _candidate(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[Path]:
        return self.folder.candidate(lambda folder: self.objective.save(folder, weights))

    def _save(self, progress: Progress) -> None:
        parameters, optimizer = get_state_dict(self._module, self._optimizer, options=_WHOLE)
        if not progress.over:
            self.folder.carry(progress.step, self._processes.rank, self.objective.carried())
        self._processes.wait()  # a state is not there before what belongs to it
        if self._processes.main:
            if not progress.trials:
                with self._candidate(_network(parameters)) as folder:
                    self.folder.keep(folder)
            tensors = {"parameters": parameters, "optimizer": optimizer}
            self.folder.save(progress, tensors, self._facts)
        self._processes.wait()

    def _restore(self, tensors: Mapping[str, Any]) -> None:
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=tensors["parameters"],
            optim_state_dict=tensors["optimizer"],
            options=_WHOLE,
        )

    def _weights(self) -> dict[str, Tensor]:
        return _network(get_model_state_dict(self._module, options=_WHOLE))

    def _say(self, sentence: str) -> None:
        if self._processes.main:
            self._report.say(sentence)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over all processes: count, loss times count, tokens, then loss, hits and rows per
    position."""

    values: Tensor
    positions: int

    @staticmethod
    def of(loss: Loss, tokens: Tensor) -> _Sums:
        single = torch.stack([loss.count.float(), loss.total.detach() * loss.count, tokens])
        return _Sums(torch.cat([single, loss.loss_P, loss.hits_P, loss.rows_P]), len(loss.loss_P))

    @property
    def count(self) -> float:
        return float(self.values[0])

    @property
    def mean(self) -> float:
        return float(self.values[1]) / max(self.count, 1.0)


class _Window:
    """Means over the last steps."""

    SIZE = 50

    def __init__(self) -> None:
        self._sums: list[_Sums] = []
        self._times = [time.monotonic()]

    def add(self, sums: _Sums) -> None:
        self._sums = [*self._sums, sums][-self.SIZE :]
        self._times = [*self._times, time.monotonic()][-self.SIZE - 1 :]

    def skip(self, seconds: float) -> None:
        """What has just passed belongs to no step."""
        self._times = [then + seconds for then in self._times]

    @property
    def loss(self) -> float:
        return sum(sums.mean for sums in self._sums) / len(self._sums)

    @property
    def accuracy(self) -> list[float]:
        count = self._sums[0].positions
        total = torch.stack([sums.values for sums in self._sums]).sum(0)
        _, hits_P, rows_P = total[3:].split(count)
        shares: list[float] = (hits_P / rows_P.clamp(min=1)).tolist()
        return shares

    @property
    def seconds_per_step(self) -> float:
        return (self._times[-1] - self._times[0]) / len(self._sums)

    @property
    def tokens_per_second(self) -> float:
        tokens = sum(float(sums.values[2]) for sums in self._sums) / len(self._sums)
        return tokens / max(self.seconds_per_step, 1e-9)


def _network(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of the network alone, whatever it is wrapped in."""
    return {_own_name(name): tensor for name, tensor in parameters.items() if _MARK in name}


def _own_name(name: str) -> str:
    """What the network itself calls a parameter."""
    return name[name.index(_MARK) + len(_MARK) :]


def _evenly(count: int, steps: int) -> set[int]:
    """`count` steps, the last among them."""
    return {round(steps * (place + 1) / count) for place in range(count)} - {0}


def prepare(
    recipe: Recipe,
    model: LoadedModel,
    data: Sequence[Path],
    folder: Path,
    report: Report,
    command: Sequence[str] = (),
) -> Trainer:
    """A run on the files of `data` that leaves a draft in `folder`."""
    found = load(data, model.tokenizer, min(recipe.max_length, model.target.info.max_length))
    learned, held = split(found, recipe.held_out, recipe.seed)
    return Trainer(recipe, model, learned, held, folder, report, command)
