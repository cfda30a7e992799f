"""What a round of a trained drafter costs beside its own forward passes.

    python -m bench.drafting --rounds 60 --batch 1,8

A round is `observe` and `propose` of the real drafter, on drafts with random weights as large as
SmolLM2's layers. Its bare passes are measured with it, round by round: the calls that the round
makes of its network and output matrix are written down with their arguments and made again, with
nothing in between; where a round is one compiled call, that call times them, from what rows are
fed to their logits; ranking those is not part of it. A second table shows what a step of the engine
costs beside the passes, those of the target and of the draft, with a tree that is verified whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import random_drafts
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.drafters import DraftContext, Drafter, make_drafter
from forerun.drafters.dflash import DFlashDrafter
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.medusa import Medusa
from forerun.engine.engine import Engine
from forerun.models.cache import Span
from forerun.models.heads import rounds as compiled_rounds
from forerun.models.hub import load
from forerun.models.target import TargetInfo
from forerun.verify import make_verifier

MODEL = "smollm2-135m"
PROMPT = 128  # tokens
NODES = 16
ROWS = 2  # newly cached per round: the last committed token and an accepted one
WARM_UP = 5
SHAPES = {"chain": f"k={random_drafts.AHEAD},top_k=1", "tree": f"top_k=4,nodes={NODES}"}


# ---- passes -------------------------------------------------------------------------------------


def passes(drafter: Drafter) -> list[tuple[Any, str]]:
    """The methods in which a drafter runs its network, and does nothing else."""
    assert isinstance(drafter, Medusa | EagleDrafter | DFlashDrafter)
    runner = drafter._runner
    names = [name for name in ("fuse", "append", "run", "logits", "rank") if hasattr(runner, name)]
    return [(drafter._target, "final_norm"), *((runner, name) for name in names)]


def in_one_call(drafter: Drafter | None) -> compiled_rounds.Rounds | None:
    """What drafts whole rounds and times their passes, if the drafter has that."""
    if not isinstance(drafter, Medusa | EagleDrafter | DFlashDrafter):
        return None
    return drafter._runner.rounds


@contextmanager
def watched(methods: Sequence[tuple[Any, str]], watch: Callable[..., Any]) -> Iterator[None]:
    """Calls of these methods go through `watch(method, *args)`, unless one makes another."""
    inside = False

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*args)
            inside = True
            try:
                return watch(method, *args)
            finally:
                inside = False

        return call

    for owner, name in methods:
        setattr(owner, name, wrapped(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods:
            delattr(owner, name)


class Recording:
    """The passes of a round, to be run again on the same rows and slots."""

    def __init__(self, drafter: Drafter) -> None:
        self.methods = passes(drafter)
        self.calls: list[tuple[Any, ...]] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Write down the passes that happen inside."""

        def note(*call: Any) -> Any:
            self.calls.append(call)
            return call[0](*call[1:])

        return watched(self.methods, note)

    def replay(self) -> float:
        """Seconds of the passes alone."""
        begin = perf_counter()
        for method, *args in self.calls:
            method(*args)
        return perf_counter() - begin


# ---- rounds -------------------------------------------------------------------------------------


class Rounds:
    """Requests that go on without a target: of every draft the first node is right."""

    def __init__(self, drafter: Drafter, info: TargetInfo, batch: int) -> None:
        self.drafter, self.vocab_size = drafter, info.vocab_size
        self.noise = torch.Generator().manual_seed(0)
        self.shape = (len(drafter.taps), info.hidden_size)
        self.dtype = info.dtype
        params = SamplingParams(temperature=0, max_tokens=100_000)
        self.requests = [
            Request(id, self._tokens(PROMPT + 1), PROMPT, params, seed=0, span=Span(0, 100_000))
            for id in range(batch)
        ]
        self._step(PROMPT)
        self.round()

    def round(self) -> float:
        """Seconds of a round."""
        for request, draft in zip(self.requests, self.drafts, strict=True):
            accepted = draft.tokens[:1] if draft else self._tokens(1)
            request.tokens += [*accepted, *self._tokens(1)]
        return self._step(ROWS)

    def _step(self, rows: int) -> float:
        for request in self.requests:
            assert request.span
            request.span.length += rows
        verdicts = [Verdict((0,), request.tokens[-1]) for request in self.requests]
        taps = [self._taps(rows) for _ in self.requests]
        budgets = [NODES] * len(self.requests)
        begin = perf_counter()
        self.drafter.observe(self.requests, verdicts, taps)
        self.drafts: Sequence[Draft] = self.drafter.propose(self.requests, budgets)
        seconds = perf_counter() - begin
        assert all(self.drafts), "a round without a draft"
        return seconds

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = torch.randint(self.vocab_size, (count,), generator=self.noise).tolist()
        return tokens

    def _taps(self, rows: int) -> Tensor:
        return torch.randn(rows, *self.shape, generator=self.noise).to(self.dtype)


@torch.inference_mode()
def measure_rounds(drafter: Drafter, info: TargetInfo, batch: int, count: int) -> list[float]:
    """Median seconds of a round and of its bare passes."""
    rounds = Rounds(drafter, info, batch)
    pairs = []
    for _ in range(WARM_UP + count):
        whole = rounds.round()
        if compiled := in_one_call(drafter):
            pairs.append((whole, compiled.seconds))
            continue
        recording = Recording(drafter)
        with recording.recorded():
            rounds.round()
        pairs.append((whole, recording.replay()))
    for request in rounds.requests:
        drafter.release(request)
    return [median(times) for times in zip(*pairs[WARM_UP:], strict=True)]


# ---- steps --------------------------------------------------------------------------------------


class Steps:
    """An engine with one endless request, whose passes are timed as they happen."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self.engine = engine
        self.seconds: list[tuple[float, float, float]] = []  # step, target's pass, draft's passes
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True))
        engine.step()

    def step(self) -> None:
        """Run and time one step."""
        spent = {True: 0.0, False: 0.0}  # in passes of the target; of the draft

        def clock(of_target: bool) -> Callable[..., Any]:
            def timed(method: Callable[..., Any], *args: Any) -> Any:
                begin = perf_counter()
                result = method(*args)
                spent[of_target] += perf_counter() - begin
                return result

            return timed

        drafter = self.engine.drafter
        compiled = in_one_call(drafter)
        with (
            watched([(self.engine.target, "forward")], clock(True)),
            watched(passes(drafter) if drafter else [], clock(False)),
        ):
            begin = perf_counter()
            self.engine.step()
            seconds = perf_counter() - begin
        of_draft = compiled.seconds if compiled else spent[False]
        self.seconds.append((seconds, spent[True], of_draft))

    def medians(self) -> tuple[float, float]:
        """Seconds of a step, and outside of its passes."""
        counted = self.seconds[WARM_UP:]
        return median(s for s, _, _ in counted), median(s - t - d for s, t, d in counted)


# ---- the report ---------------------------------------------------------------------------------


def main(
    rounds: Annotated[int, typer.Option(help="rounds and steps per line")] = 60,
    batch: Annotated[str, typer.Option(help="requests at once, as 1,8")] = "1,8",
) -> None:
    """Measure all trained drafters, as chains and as trees."""
    target = load(MODEL).target
    with tempfile.TemporaryDirectory() as folder:
        folders = random_drafts.write(Path(folder), target.info)

        def make(name: str, shape: str) -> Drafter:
            options = SHAPES[shape]
            if name.startswith("eagle"):  # random drafts would stop after a level
                options += (
                    f",k={random_drafts.AHEAD},min_prob=0" if shape == "tree" else ",min_prob=0"
                )
            context = DraftContext(target, target.new_store(16384), None, load)
            drafter = make_drafter(f"{name}:{folders[name]},{options}", context)
            assert drafter
            return drafter

        drafters = {(n, s): make(n, s) for n in folders for s in SHAPES}
    console = Console()
    table = Table("drafter", "shape", "batch", "round", "passes", "ratio", title="ms per round")
    for size in map(int, batch.split(",")):
        for (name, shape), drafter in drafters.items():
            whole, bare = measure_rounds(drafter, target.info, size, rounds)
            table.add_row(
                name,
                shape,
                str(size),
                f"{1e3 * whole:.3f}",
                f"{1e3 * bare:.3f}",
                f"{whole / bare:.2f}",
            )
    console.print(table)

    prompt = torch.randint(target.info.vocab_size, (PROMPT,)).tolist()
    store = target.new_store(16384)  # one for all: another one takes half a millisecond to get to

    def engine(drafter: Drafter | None) -> Steps:
        return Steps(
            Engine(
                target,
                store=store,
                verifier=make_verifier("follow"),
                drafter=drafter,
                static=True,
            ),
            prompt,
        )

    engines = {"plain": engine(None)} | {name: engine(drafters[name, "tree"]) for name in folders}
    for _ in range(WARM_UP + rounds):
        for steps in engines.values():
            steps.step()
    plain = engines["plain"].medians()[0]
    table = Table(
        "drafter",
        "step",
        "outside of passes",
        "of a plain step",
        title=f"ms per step, {NODES} nodes",
    )
    for name, steps in engines.items():
        whole, outside = steps.medians()
        table.add_row(name, f"{1e3 * whole:.2f}", f"{1e3 * outside:.3f}", f"{outside / plain:.1%}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
