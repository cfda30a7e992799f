"""How far a long command is, on stderr: what is done, how fast, and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

TERMINAL, FILE = 0.5, 30.0  # seconds between two lines


class Progress:
    """Counts what is done, in things and in tokens.

    total: things there are to do; done: of these, how many were there before this run.
    A terminal has one line that changes, a file gets a line every half minute.
    """

    def __init__(
        self,
        what: str,
        total: int,
        done: int = 0,
        file: TextIO | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.what = what
        self.total = total
        self.done = self.before = done
        self.tokens = 0
        self.file = file or sys.stderr
        self._clock = clock
        self._begin = self._shown = clock()
        self._terminal = self.file.isatty()

    def add(self, tokens: int = 0) -> None:
        """One more is done."""
        self.done += 1
        self.tokens += tokens
        if self._clock() - self._shown >= (TERMINAL if self._terminal else FILE):
            self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._show()
        if self._terminal:
            print(file=self.file, flush=True)

    def line(self) -> str:
        """As `answers 312/4000, 41200 tokens, 1040 tok/s, 12 min left`."""
        seconds = max(self._clock() - self._begin, 1e-9)
        rate = (self.done - self.before) / seconds
        parts = [f"{self.what} {self.done}/{self.total}"]
        if self.tokens:
            parts += [f"{self.tokens} tokens", f"{self.tokens / seconds:.0f} tok/s"]
        else:
            parts.append(f"{rate:.1f}/s")
        left = self.total - self.done
        parts.append(f"{_duration(left / rate)} left" if left and rate else _duration(seconds))
        return ", ".join(parts)

    def _show(self) -> None:
        self._shown = self._clock()
        if self._terminal:
            print(f"\r\x1b[K{self.line()}", end="", file=self.file, flush=True)
        else:
            print(self.line(), file=self.file, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
