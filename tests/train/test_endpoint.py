"""Answers from a server: what is sent, what comes back, and what can go wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.core import SamplingParams
from forerun.errors import ModelError, PromptError
from forerun.train.answers import Question, Record
from forerun.train.endpoint import TRIES, Endpoint

Reply = tuple[int, Any]  # status and body
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=20, seed=0)


class Server:
    """Answers by a rule; remembers what it was asked and how many asked at once."""

    def __init__(self) -> None:
        self.rule: Callable[[dict[str, Any]], Reply] = echo
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.running += 1
                    server.most = max(server.most, server.running)
                    server.asked.append(body)
                    server.headers.append(dict(self.headers))
                    server.paths.append(self.path)
                status, reply = server.rule(body)
                raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                with server.lock:
                    server.running -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def completion(text: str, reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": len(text)}}


def echo(body: dict[str, Any]) -> Reply:
    return completion("re: " + body["messages"][-1]["content"])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def ask(*turns: str) -> Question:
    return Question([{"role": "user", "content": turn} for turn in turns], PARAMS)


def refuse(question: Question, error: PromptError) -> None:
    raise error


def answers(server: Server, *questions: Question, **options: Any) -> list[tuple[Record, int]]:
    endpoint = Endpoint(server.url, "m", pause=0.001, **options)
    return list(endpoint.answer(questions, 2, refuse))


def test_turns_are_asked_one_after_another(server: Server) -> None:
    question = ask("One", "Two")
    ((record, tokens),) = answers(server, question)
    said = [message["content"] for message in record["messages"]]
    assert said == ["One", "re: One", "Two", "re: Two"]
    assert tokens == len("re: One") + len("re: Two")
    assert record["finish"] == ["stop", "stop"]
    assert (record["id"], record["model"], record["temperature"]) == (question.id, "m", 0.7)
    assert [body["messages"] for body in server.asked] == [
        record["messages"][:1],
        record["messages"][:3],
    ]
    for turn, body in enumerate(server.asked):
        assert {key: body[key] for key in body if key != "messages"} == {
            "model": "m",
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 20,
            "seed": question.seed(turn),
        }
    assert server.paths == ["/v1/chat/completions"] * 2
    assert "Authorization" not in server.headers[0]


def test_url_and_key(server: Server) -> None:
    endpoint = Endpoint(server.url + "/chat/completions", "m", key="secret")
    assert len(list(endpoint.answer([ask("a")], 1, refuse))) == 1
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_requests_run_together(server: Server) -> None:
    together = threading.Barrier(3, timeout=20)

    def rule(body: dict[str, Any]) -> Reply:
        together.wait()
        return echo(body)

    server.rule = rule
    endpoint = Endpoint(server.url, "m")
    found = list(endpoint.answer([ask(str(number)) for number in range(6)], 3, refuse))
    assert len({record["id"] for record, _ in found}) == 6
    assert server.most == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server: Server, status: int) -> None:
    def rule(body: dict[str, Any]) -> Reply:
        return echo(body) if len(server.asked) == 3 else (status, {"error": "later"})

    server.rule = rule
    assert answers(server, ask("a"))[0][0]["messages"][1]["content"] == "re: a"
    server.asked.clear()
    server.rule = lambda body: (status, {"error": "later"})
    with pytest.raises(ModelError, match=rf"does not answer \(status {status}: .*later"):
        answers(server, ask("a"))
    assert len(server.asked) == TRIES


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            (401, {"error": "no key"}),
            "status 401: .*no key.*; check the URL, the model and the key",
        ),
        ((404, {}), "status 404"),
        ((200, b"<html>"), "no JSON"),
        ((200, {"choices": []}), "no chat completion"),
        ((200, [1]), "no chat completion"),
        ((200, {"choices": [{"message": {"content": None}}]}), "no chat completion"),
    ],
)
def test_a_wrong_server_is_asked_once(server: Server, reply: Reply, message: str) -> None:
    server.rule = lambda body: reply
    with pytest.raises(ModelError, match=message):
        answers(server, ask("a"))
    assert len(server.asked) == 1


def test_nobody_listens(server: Server) -> None:
    endpoint = Endpoint("http://127.0.0.1:9", "m", pause=0.001)
    with pytest.raises(ModelError, match="does not answer"):
        list(endpoint.answer([ask("a")], 1, refuse))


def test_prompts_that_do_not_fit(server: Server) -> None:
    def rule(body: dict[str, Any]) -> Reply:
        long = "long" in body["messages"][-1]["content"]
        return (400, {"message": "too long"}) if long else echo(body)

    server.rule = rule
    skipped = []
    endpoint = Endpoint(server.url, "m")
    questions = [ask("long"), ask("a", "long"), ask("b")]
    found = list(endpoint.answer(questions, 2, lambda q, error: skipped.append((q, str(error)))))
    assert [question for question, _ in skipped] == questions[:1]
    assert "too long" in skipped[0][1]
    said = sorted([m["content"] for m in record["messages"]] for record, _ in found)
    assert said == [["a", "re: a"], ["b", "re: b"]]


def test_the_command(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("One\nTwo\nThree\nOne\n")
    arguments = ["data", "answers", str(prompts), "--out", str(out), "--endpoint", server.url]
    assert main(arguments) == 1
    assert "--served-model" in capsys.readouterr().err
    arguments += ["--served-model", "m", "--temperature", "0.5", "--api-key-env", "SOME_KEY"]
    assert main(arguments) == 1
    assert "SOME_KEY: this variable is not set" in capsys.readouterr().err
    monkeypatch.setenv("SOME_KEY", "secret")

    server.rule = lambda body: (401, {})
    assert main([*arguments, "--concurrency", "1"]) == 1
    assert out.read_text() == ""
    server.rule = echo
    assert main(arguments) == 0
    assert "answers 3/3, 23 tokens" in capsys.readouterr().err
    lines = out.read_text().splitlines()
    texts = sorted(json.loads(line)["messages"][1]["content"] for line in lines)
    assert texts == ["re: One", "re: Three", "re: Two"]
    asked = len(server.asked)
    assert main(arguments) == 0
    assert (len(server.asked), out.read_text().splitlines()) == (asked, lines)
    assert main([*arguments, "--served-model", "n"]) == 1
    assert "holds answers of m, not of n" in capsys.readouterr().err
