"""From tokens to text: incremental decoding, stop strings and the other ends of an output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from forerun.core import Request, StepStats, TokenLogprobs
from forerun.engine.outputs import Delta


class TokenStream(Protocol):
    """Turns tokens into text one by one."""

    def push(self, token_id: int) -> str:
        """The text that became certain; "" inside a UTF-8 character."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come."""
        ...


class Generation:
    """One stream of output: its request, text, counters and clock.

    Works token by token, so that nothing depends on how many of them a step brought.
    """

    def __init__(self, request: Request, index: int, stream: TokenStream | None) -> None:
        self.request = request
        self.index = index
        self.stats = StepStats()
        self.added_at = time.perf_counter()
        self.first_at = self.ended_at = 0.0
        self._stream = stream
        self._held = ""  # text that could be the beginning of a stop string

    def emit(self, new: int, sources: list[str], logprobs: list[TokenLogprobs] | None) -> Delta:
        """Emit the request's `new` last tokens, up to where the output ends.

        Tokens behind the end are forgotten, and `finish_reason` is set on the request.
        """
        request = self.request
        start = len(request.tokens) - new
        text = ""
        count = 0
        for token in request.tokens[start:]:
            count += 1
            text += self._push(token, start + count - request.prompt_length)
            if request.finish_reason:
                break
        del request.tokens[start + count :]
        now = time.perf_counter()
        self.first_at = self.first_at or now
        self.ended_at = now
        return Delta(
            self.index,
            text,
            request.tokens[start:],
            sources[:count],
            logprobs and logprobs[:count],
            request.finish_reason,
            request.id,
        )

    def _push(self, token: int, length: int) -> str:
        """The text that is certain once `token`, the output's token number `length`, is known."""
        request, params = self.request, self.request.params
        if token in request.stop_ids:  # sampling chooses none before min_tokens
            request.finish_reason = "stop"
            return self._rest(token if params.include_stop_str_in_output else None)
        if self._stream:
            self._held += self._stream.push(token)
        if params.stop and length >= params.min_tokens:
            cut = find_stop(self._held, params.stop, params.include_stop_str_in_output)
            if cut is not None:
                request.finish_reason = "stop"
                return self._held[:cut]
        if length >= params.max_tokens:
            request.finish_reason = "length"
            return self._rest(None)
        certain = possible_stop(self._held, params.stop) if params.stop else len(self._held)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _rest(self, last: int | None) -> str:
        """All text that is left, that of the token `last` included."""
        if not self._stream:
            return ""
        if last is not None:
            self._held += self._stream.push(last)
        return self._held + self._stream.flush()


def find_stop(text: str, stops: Sequence[str], include: bool) -> int | None:
    """Where to cut `text` at the stop string that ends first; None if it holds none."""
    found = [(text.find(stop), stop) for stop in stops]
    ends = [(begin + len(stop), begin) for begin, stop in found if begin >= 0]
    if not ends:
        return None
    end, begin = min(ends)
    return end if include else begin


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """Where the end of `text` begins that may yet grow into a stop string; len(text) if none."""
    longest = max(map(len, stops)) - 1
    for begin in range(max(0, len(text) - longest), len(text)):
        end = text[begin:]
        if any(len(stop) > len(end) and stop.startswith(end) for stop in stops):
            return begin
    return len(text)
