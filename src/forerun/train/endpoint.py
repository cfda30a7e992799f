"""Answers from a server that speaks OpenAI's chat completions: vLLM, SGLang, llama.cpp, forerun."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

from forerun.errors import ModelError, PromptError
from forerun.train.answers import Question, Record, Skip, record_of

BUSY = (408, 425, 429, 500, 502, 503, 504)  # worth another try
UNFIT = (400, 413, 422)  # the fault of this prompt
TRIES = 6  # a second to wait after the first, then twice as long each time
TIMEOUT = 600  # seconds without an answer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is served.

    url: with or without the path `/chat/completions`, as `http://localhost:8000/v1`.
    model: its name there. key: sent as a bearer token. pause: seconds before the second try.
    """

    url: str
    model: str
    key: str | None = None
    pause: float = 1.0

    def answer(
        self, questions: Iterable[Question], concurrency: int, skip: Skip
    ) -> Iterator[tuple[Record, int]]:
        """As `forerun.train.answers.answer`; the records hold no tokens, as servers give none.

        Raises `ModelError` when the server cannot be reached or refuses the key or the model.
        """
        waiting = iter(questions)
        pool = ThreadPoolExecutor(concurrency)
        running: dict[Future[tuple[Record, int]], Question] = {}
        try:
            while True:
                for question in islice(waiting, concurrency - len(running)):
                    running[pool.submit(self._converse, question)] = question
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    question = running.pop(future)
                    try:
                        found = future.result()
                    except PromptError as error:
                        skip(question, error)
                    else:
                        yield found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _converse(self, question: Question) -> tuple[Record, int]:
        """Let one conversation be answered, turn by turn."""
        messages: list[dict[str, str]] = []
        finish: list[str] = []
        written = 0
        for turn, part in enumerate(question.parts()):
            asked = [*messages, *part]
            try:
                reply = self._post(self._body(question, asked, turn))
            except PromptError:
                if not finish:
                    raise
                break  # too long by now
            text, reason, tokens = self._read(reply)
            messages = [*asked, {"role": "assistant", "content": text}]
            finish.append(reason)
            written += tokens
        return record_of(question, self.model, messages, finish), written

    def _body(
        self, question: Question, messages: list[dict[str, str]], turn: int
    ) -> dict[str, Any]:
        params = question.params
        return {
            "model": self.model,
            "messages": messages,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "seed": question.seed(turn),
        }

    def _read(self, reply: Any) -> tuple[str, str, int]:
        """Text, finish reason and number of tokens of a reply."""
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"]
            tokens = (reply.get("usage") or {}).get("completion_tokens", 0)
            if not isinstance(text, str):
                raise TypeError
            return text, choice.get("finish_reason") or "stop", tokens
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ModelError(
                f"{self.url} gave {json.dumps(reply)[:200]}, no chat completion; check it"
            ) from None

    def _post(self, body: dict[str, Any]) -> Any:
        url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {error.read(300).decode(errors='replace').strip()}"
                if error.code in UNFIT:
                    raise PromptError(f"{url} refuses the prompt ({problem}); shorten it") from None
                if error.code not in BUSY:
                    break
            except json.JSONDecodeError:
                problem = "what it says is no JSON"
                break
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
        raise ModelError(f"{url} does not answer ({problem}); check the URL, the model and the key")
