"""One engine in one mode in a process of its own, which runs only while it is asked something.

Two engines that keep a thread per core slow each other tenfold even when one of them only waits at
a barrier, so the process is stopped (SIGSTOP) between questions.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.engines import Engine, PeerError

LOADING, ANSWERING, FAREWELL = 300.0, 300.0, 20.0  # seconds before a process is given up


@dataclass(frozen=True)
class Answer:
    """What came back for a batch of prompts; outputs are cut before the first stop token."""

    outputs: list[list[int]]
    seconds: float
    ttft: float | None
    peak_rss_mb: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class Lane:
    """Start with `with Lane(...) as lane`, then `lane.ask(prompts, max_tokens)`."""

    def __init__(
        self, engine: Engine, mode: str, model: Path, stop_ids: list[int], logs: Path
    ) -> None:
        self.engine, self.mode, self.model, self.stop_ids = engine, mode, model, stop_ids
        self.name = f"{engine.name} {mode}"
        self.log = logs / f"{engine.name}-{mode}.log"
        self.versions: dict[str, str] = {}
        self.load_seconds = 0.0  # until the engine can be asked, imports included
        self.peak_rss_mb = 0.0

    def __enter__(self) -> Lane:
        options = {
            "model": str(self.model),
            "mode": self.mode,
            "stop_ids": self.stop_ids,
            "threads": len(os.sched_getaffinity(0)),
        }
        start = time.perf_counter()
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [self.engine.python, self.engine.worker, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.engine.variables(),
                start_new_session=True,  # a group of its own, to stop and to end as one
            )
        try:
            self.versions = self._read(LOADING)["versions"]
            self.load_seconds = time.perf_counter() - start
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._end(patience=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(patience=0 if kind else FAREWELL)

    def ask(self, prompts: list[list[int]], max_tokens: int) -> Answer:
        """Answer a batch greedily. Raises `PeerError` when the process has died."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin
        try:
            print(
                json.dumps({"prompts": prompts, "max_tokens": max_tokens}),
                file=self.process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended; see {self.log}") from None
        reply = self._read(ANSWERING)
        self._signal(signal.SIGSTOP)
        self.peak_rss_mb = reply["peak_rss_mb"]
        return Answer(
            outputs=[self._before_stop(output) for output in reply["outputs"]],
            seconds=reply["seconds"],
            ttft=reply["ttft"],
            peak_rss_mb=reply["peak_rss_mb"],
        )

    def _before_stop(self, output: list[int]) -> list[int]:
        """Engines differ in whether they hand the stop token out."""
        ends = [i for i, token in enumerate(output) if token in self.stop_ids]
        return output[: ends[0]] if ends else output

    def _read(self, patience: float) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], patience)[0]:
            raise PeerError(f"{self.name} said nothing for {patience:.0f} s; see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} has ended; see {self.log}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def _end(self, patience: float) -> None:
        self._signal(signal.SIGCONT)
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.close()
            self.process.wait(patience)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._signal(signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
