"""Strict settings: pydantic models that refuse unknown names and suggest the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from forerun.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: `did you mean 'top_p'?`, or the list of what exists."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(names)}"


class Settings(BaseModel):
    """Base of every settings class. Wrong names and values raise `ConfigError` with one line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            return f"{cls.__name__} has no '{name}'; {nearest(name, cls.model_fields)}"
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        return f"{cls.__name__}: {name or 'values'}: {problem} (got {first['input']!r})"
