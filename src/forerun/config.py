"""Strict settings: pydantic models that refuse unknown names and suggest the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from forerun.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: `did you mean 'top_p'?`, or the list of what exists."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(names)}"


class Settings(BaseModel):
    """Base of every settings class. Wrong names and values raise `ConfigError` with one line.

    title: what messages call it, in the user's words; None is the name of the class.
    """

    title: ClassVar[str | None] = None
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{self._title()} cannot be changed; make another, "
            f"for example with model_copy(update={{{name!r}: ...}})"
        )

    @classmethod
    def _title(cls) -> str:
        return cls.title or cls.__name__

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            return f"{cls._title()} has no '{name}'; {nearest(name, cls.model_fields)}"
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if not name:
            return f"{cls._title()}: {problem}"
        return f"{cls._title()}: {name}: {problem} (got {first['input']!r})"
