"""The engine: schedule, draft, plan, forward, verify, commit, emit."""

from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.outputs import Completion, Delta, RequestOutput

__all__ = ["LLM", "Completion", "Delta", "Engine", "RequestOutput"]
