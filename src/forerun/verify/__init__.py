"""Verifiers: what survives of a draft, and which token follows."""

from __future__ import annotations

import inspect
from typing import Any

from forerun.config import nearest
from forerun.errors import ConfigError
from forerun.verify.base import Verifier
from forerun.verify.follow import Follow
from forerun.verify.reference import Reference
from forerun.verify.rejection import Rejection
from forerun.verify.typical import Typical

__all__ = ["VERIFIERS", "Verifier", "make_verifier"]

VERIFIERS: dict[str, type[Verifier]] = {
    kind.name: kind for kind in (Follow, Rejection, Typical, Reference)
}


def make_verifier(name: str, **options: Any) -> Verifier:
    """The verifier of this name. Unknown names and options raise `ConfigError`."""
    if name not in VERIFIERS:
        raise ConfigError(f"there is no verifier '{name}'; {nearest(name, VERIFIERS)}")
    kind = VERIFIERS[name]
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            advice = nearest(option, known) if known else "it takes none"
            raise ConfigError(f"verifier '{name}' has no option '{option}'; {advice}")
    return kind(**options)
