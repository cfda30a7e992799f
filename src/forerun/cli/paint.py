"""Text in the colours of those who proposed it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.engine.outputs import Delta
    from forerun.models.tokenizer import TextStream

RESET = "\x1b[0m"
COLOURS = ("\x1b[32m", "\x1b[36m", "\x1b[35m", "\x1b[33m", "\x1b[34m", "\x1b[31m")


class Painter:
    """Colours the text of deltas token by token. What the target chose itself stays plain.

    The engine says which text is certain, but not which token it came from, and holds text back
    where a stop string may begin. So tokens are decoded here again, and given out as far as the
    text of the deltas reaches.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._pieces: deque[tuple[str, str]] = deque()  # text and source, not given out yet
        self._colours: dict[str, str] = {}

    def paint(self, delta: Delta) -> str:
        """The text of a delta with colours."""
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._pieces.append((self._stream.push(token), source))
        painted, rest = "", delta.text
        while rest and self._pieces:
            piece, source = self._pieces.popleft()
            painted += self._coloured(piece[: len(rest)], source)
            if len(piece) > len(rest):
                self._pieces.appendleft((piece[len(rest) :], source))
            rest = rest[len(piece) :]
        return painted + rest

    def legend(self) -> str:
        """Which colour is whose."""
        names = [self._coloured(source, source) for source in self._colours]
        return (
            f"proposed by {', '.join(names)}; the rest by the model itself"
            if names
            else ("all tokens by the model itself")
        )

    def _coloured(self, text: str, source: str) -> str:
        if not source or not text:
            return text
        colour = self._colours.setdefault(source, COLOURS[len(self._colours) % len(COLOURS)])
        return f"{colour}{text}{RESET}"
