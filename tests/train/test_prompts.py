"""The user's own prompts, in all forms; what is filtered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.train.filters import Seen, fault, normalised
from forerun.train.prompts import has_text, read_prompts

STORY = (
    "Mara keeps {n} hens, and each of them lays an egg on four days of the week. She sells the "
    "eggs at the market for 30 cents each. How much does she earn in a month of four weeks?"
)


def user(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


def test_forms_of_a_line(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    talk = [system, *user("One "), {"role": "assistant", "content": "1"}, *user("Two")]
    lines = [{"prompt": " a\r\nb  \n"}, {"turns": ["x", "y"]}, {"messages": talk, "id": 7}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    wanted = [user("a\nb"), user("x", "y"), [system, *user("One", "Two")]]
    assert list(read_prompts(path)) == wanted
    text = tmp_path / "mine.txt"
    text.write_text(path.read_text())
    assert list(read_prompts(text)) == wanted  # it begins with a brace
    text.write_text("What is 1?\n\n Why? \n{x}\n")
    assert list(read_prompts(text)) == [user("What is 1?"), user("Why?"), user("{x}")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"text": "a"}', "no prompt in it"),
        ("[]", "no prompt in it"),
        ('{"prompt": 1}', "'prompt' must hold a text"),
        ('{"turns": "a"}', "'turns' must hold a list of texts"),
        ('{"messages": [{"role": "user"}]}', "'messages' must be a list"),
        ('{"messages": 3}', "'messages' must be a list"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "the role 'tool' is unknown"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ConfigError, match=rf"mine\.jsonl line 2.*{message}"):
        list(read_prompts(path))


def test_folders_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    with pytest.raises(ConfigError, match="pip install datasets"):
        list(read_prompts(tmp_path))

    rows: Any = [{"prompt": "a"}, {"prompt": "b"}]
    fake = SimpleNamespace(load_from_disk=lambda path: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_prompts(tmp_path)) == [user("a"), user("b")]
    rows = {"train": rows, "test": [{"turns": ["c"]}, {"answer": 1}]}
    found = read_prompts(tmp_path)
    assert [next(found) for _ in range(3)] == [user("a"), user("b"), user("c")]
    with pytest.raises(ConfigError, match="test 2: no prompt in it"):
        next(found)

    def refuse(path: str) -> None:
        raise FileNotFoundError("no state.json")

    fake.load_from_disk = refuse
    with pytest.raises(ConfigError, match="save_to_disk"):
        list(read_prompts(tmp_path))


def test_text_is_needed() -> None:
    assert has_text(user("a"))
    assert not has_text(user("a", ""))
    assert not has_text([{"role": "system", "content": "a"}])


def test_normalised() -> None:
    assert normalised(" e\u0301a \r\n  b\t\n\n") == "éa\n  b"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (STORY.format(n=7), None),
        ("Hi!", None),
        ("为什么天空是蓝色的?", None),
        ("def f(a, b):\n    return a + b\n\nAdd type hints to this function.", None),
        ("", "empty"),
        ("?!... --\n", "empty"),
        ("the same thing again and again, " * 8, "repetitive"),
        ("a list: " + "1, 1, " * 60, "repetitive"),
        ("哈哈" * 60, "repetitive"),
        ("word " * 21, "repetitive"),
    ],
)
def test_faults(text: str, reason: str | None) -> None:
    assert fault(text) == reason


def test_duplicates() -> None:
    seen = Seen()
    assert seen.add("Why is the sky blue?") is None
    assert seen.add(" why is  the sky BLUE ?") == "duplicate"
    assert seen.add("Why is the sky blue") is None  # signs count: a+b is not a-b
    assert seen.add(STORY.format(n=7)) is seen.add(STORY.format(n=8)) is None


def test_near_duplicates() -> None:
    seen = Seen(near=True)
    assert seen.add(STORY.format(n=7)) is None
    assert seen.add(STORY.format(n=8)) == "near-duplicate"
    assert seen.add("So: " + STORY.format(n=9)) == "near-duplicate"
    assert seen.add(STORY.format(n=7)) == "duplicate"
    assert seen.add("How much does Mara earn with seven hens in a month of four weeks?") is None
    assert seen.add("Hi") is seen.add("Hi there") is None
    # of many pairs none is missed, and none is invented
    for number in range(200):
        words = [f"w{number}x{place}" for place in range(40)]
        assert seen.add(" ".join(words)) is None
        assert seen.add(" ".join(words[:-4])) == "near-duplicate"
        assert seen.add(" ".join(words[:20])) is None
