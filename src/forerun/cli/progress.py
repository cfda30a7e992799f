"""How far a long command is, on stderr: what is done, how fast, and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

TERMINAL, FILE = 0.5, 30.0  # seconds between two lines


class Line:
    """A terminal has one line that changes, a file gets a line every half minute."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.file = file or sys.stderr
        self._clock = clock
        self._terminal = self.file.isatty()
        self._shown = clock()
        self._open = False  # a line of the terminal that may still change

    @property
    def due(self) -> bool:
        """Whether it is time for `show`."""
        return self._clock() - self._shown >= (TERMINAL if self._terminal else FILE)

    def show(self, text: str) -> None:
        """Put this in the place of what was shown before."""
        self._shown = self._clock()
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=self.file, flush=True)
            self._open = True
        else:
            print(text, file=self.file, flush=True)

    def say(self, sentence: str) -> None:
        """A line that stays."""
        clear = "\r\x1b[K" if self._open else ""
        print(f"{clear}{sentence}", file=self.file, flush=True)
        self._open = False

    def end(self) -> None:
        """What is shown now stays."""
        if self._open:
            print(file=self.file, flush=True)
        self._open = False


class Progress:
    """Counts what is done, in things and in tokens.

    total: things there are to do; done: of these, how many were there before this run.
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
        self._clock = clock
        self._begin = clock()
        self._line = Line(file, clock)

    def add(self, tokens: int = 0) -> None:
        """One more is done."""
        self.done += 1
        self.tokens += tokens
        if self._line.due:
            self._line.show(self.line())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.show(self.line())
        self._line.end()

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
        parts.append(f"{duration(left / rate)} left" if left and rate else duration(seconds))
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """As `40 s`, `12 min` or `3 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
