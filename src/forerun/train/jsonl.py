"""Files with one JSON value per line: read with places for messages, written so that a kill costs
no line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with its place as messages call it.

    Only newlines end a line: texts may hold other separators. Raises `ConfigError`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path} line {number}", line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a file in UTF-8") from None


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """What the lines hold. Raises `ConfigError` naming a line that is no JSON."""
    for place, line in read_lines(path):
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place} is not JSON: {error.msg}; mend it") from None


class Journal:
    """A file that lines are appended to, each as a whole.

    What an earlier run left is kept; half a line at its end, where it was killed, is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}; choose another --out") from None
        self._repair()

    def append(self, record: Any) -> None:
        """Write one line; it is in the file when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def _repair(self) -> None:
        """End the last line, or drop it if it is not whole."""
        end = self._file.seek(0, 2)
        begin = self._last_line(end)
        self._file.seek(begin)
        if not (line := self._file.read()):
            return
        try:
            json.loads(line)
        except ValueError:
            self._file.truncate(begin)
        else:
            self._file.write(b"\n")

    def _last_line(self, end: int, block: int = 1 << 16) -> int:
        """Where what follows the last newline begins."""
        while end > 0:
            begin = max(0, end - block)
            self._file.seek(begin)
            place = self._file.read(end - begin).rfind(b"\n")
            if place >= 0:
                return begin + place + 1
            end = begin
        return 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
