"""What other people's files and libraries give us, as one line for the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError` when there is none or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON ({reason(error)}); fetch it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object; fetch it again")
    return content


def reason(error: BaseException) -> str:
    """Why another library failed: its first line, and the next one where that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
