"""forerun: speculative decoding for self-hosted language models.

from forerun import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.core import SamplingParams
    from forerun.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": "forerun.engine.llm", "SamplingParams": "forerun.core"}


def __getattr__(name: str) -> object:
    """Import on first use: torch takes seconds, which `forerun --help` need not wait for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
