"""Seeds that follow from what they are for, so that the order of work makes no difference."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any


def seed_from(*parts: Any) -> int:
    """A seed of 63 bits from values that JSON can hold."""
    return int(digest(*parts), 16) >> 1


def digest(*parts: Any) -> str:
    """Sixteen hex digits from values that JSON can hold."""
    return blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
