"""How `bench.peers` talks to an engine in a process of its own: one JSON object a line.

argv[1]   {"model": PATH, "mode": NAME, "stop_ids": [...], "threads": N}
stdout    {"versions": {...}, "load_seconds": s}                      once, when loaded
stdin     {"prompts": [[id, ...], ...], "max_tokens": n}              a batch to answer greedily
stdout    {"outputs": [[id, ...], ...], "seconds": s, "ttft": s, "peak_rss_mb": m}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Prompts = list[list[int]]
FirstToken = Callable[[], None]  # called when the first token of the first request is there
Generate = Callable[[Prompts, int, FirstToken], list[list[int]]]


@dataclass(frozen=True)
class Options:
    """What to load and how."""

    model: str
    mode: str
    stop_ids: list[int]
    threads: int


def peak_rss_mb() -> float:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match, "no VmHWM in /proc/self/status"
    return int(match[1]) / 1024


def serve(load: Callable[[Options], Generate], packages: list[str]) -> None:
    """Load an engine, then answer batches until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever the engine prints goes to the log

    def reply(message: dict[str, object]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    start = time.perf_counter()
    generate = load(Options(**json.loads(sys.argv[1])))
    versions = {name: importlib.metadata.version(name) for name in packages}
    reply({"versions": versions, "load_seconds": time.perf_counter() - start})
    for line in sys.stdin:
        reply(timed(generate, **json.loads(line)))


def timed(generate: Generate, prompts: Prompts, max_tokens: int) -> dict[str, object]:
    """Answer a batch and say how long it took. `ttft` is None where the engine cannot tell."""
    first: list[float] = []
    start = time.perf_counter()
    outputs = generate(prompts, max_tokens, lambda: first.append(time.perf_counter()))
    seconds = time.perf_counter() - start
    ttft = first[0] - start if first else None
    return {"outputs": outputs, "seconds": seconds, "ttft": ttft, "peak_rss_mb": peak_rss_mb()}
