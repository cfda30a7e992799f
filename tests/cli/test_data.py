"""`forerun data` on a random model: files in, files out, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main
from tiny import tiny_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("tiny") / "model", layers=1))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_collected_once(tmp_path: Path, capsys: Capture) -> None:
    mine, notes, out = (tmp_path / name for name in ("mine.jsonl", "notes.txt", "out.jsonl"))
    mine.write_text('{"prompt": "One?"}\n{"turns": ["One?", "Two?"]}\n{"prompt": " "}\n')
    notes.write_text("one ?\nThree?\n")
    arguments = ["data", "prompts", str(mine), str(notes), "--out", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert said == "3 prompts added, 40% dropped: 1 empty, 1 duplicate\n"
    asked = [[message["content"] for message in line["messages"]] for line in lines(out)]
    assert asked == [["One?"], ["One?", "Two?"], ["Three?"]]
    assert main(arguments) == 0
    assert capsys.readouterr().err == "0 prompts added, 100% dropped: 4 duplicate, 1 empty\n"
    assert len(lines(out)) == 3


def test_written_prompts_go_on(model: str, tmp_path: Path, capsys: Capture) -> None:
    def write(name: str, count: int) -> list[dict[str, object]]:
        out = tmp_path / name
        options = ["--model", model, "--max-tokens", "80", "--batch", "32", "--dtype", "float32"]
        systems = ["--system", "a", "--system", "b", "--temperature", "2"]
        assert (
            main(["data", "prompts", "--write", str(count), "--out", str(out), *options, *systems])
            == 0
        )
        return lines(out)

    whole = write("whole.jsonl", 4)
    assert len(whole) == 4
    assert "prompts 4/4" in capsys.readouterr().err
    parts = write("parts.jsonl", 2)
    assert parts == whole[:2]
    torn = tmp_path / "parts.jsonl"
    torn.write_text(torn.read_text() + '{"messages": [{"ro')
    assert write("parts.jsonl", 4) == whole
    capsys.readouterr()
    assert write("parts.jsonl", 3) == whole
    assert "holds 4 prompts already" in capsys.readouterr().err


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_answers_with_and_without_a_draft(
    model: str, tmp_path: Path, capsys: Capture, draft: str
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("One\nTwo\n")
    arguments = ["data", "answers", str(prompts), "--out", str(out), "--model", model]
    arguments += ["--max-tokens", "8", "--dtype", "float32", "--draft", draft]
    arguments += ["--temperature", "0", "--temperature", "1"]
    assert main(arguments) == 0
    found = {line["id"]: line for line in lines(out)}
    assert len(found) == 4
    assert sorted(line["temperature"] for line in found.values()) == [0.0, 0.0, 1.0, 1.0]
    # top-p does not turn a greedy answer into another one, but a sampled one
    assert main([*arguments, "--top-p", "0.9"]) == 0
    assert "answers 4/4" in capsys.readouterr().err
    assert len(lines(out)) == 6


def test_what_is_too_long(model: str, tmp_path: Path, capsys: Capture) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    arguments = ["data", "answers", str(prompts), "--out", str(out), "--model", model]
    arguments += ["--max-tokens", "8"]
    prompts.write_text("x" * 600 + "\nTwo\n")
    assert main(arguments) == 0
    assert "1 left out; the first: the prompt has" in capsys.readouterr().err
    assert len(lines(out)) == 1
    prompts.write_text("x" * 600 + "\n")
    assert main(arguments) == 1
    assert "no prompt could be answered; the first: the prompt has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompts"], "give files to collect prompts from, or --write N"),
        (["prompts", "a.txt", "--write", "3"], "one of the two"),
        (["prompts", "--write", "0"], "numbers above 0"),
        (["prompts", "--write", "2", "--temperature", "-1"], "temperature"),
        (["prompts", "none.txt"], "cannot read none.txt"),
        (["answers", "none.txt"], "cannot read none.txt"),
        (["answers", "a.txt", "--batch", "0"], "numbers above 0"),
        (["answers", "a.txt", "--served-model", "m"], "belong to --endpoint"),
        (["answers", "a.txt", "--temperature", "-1"], "temperature"),
        (["answers", "a.txt", "--draft", "nothing"], "nothing"),
        (["answers", "empty.txt"], "empty.txt holds no prompts"),
        (["prompts", "empty.txt"], "no prompts in empty.txt"),
    ],
)
def test_what_cannot_be_used(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    Path("empty.txt").write_text("\n")
    assert main(["data", *arguments, "--out", "out.jsonl"]) == 1
    assert message in capsys.readouterr().err


def test_files_of_other_commands(model: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert main(["data", "prompts", "--write", "2", "--model", model, "--out", str(out)]) == 1
    assert "was not written by --write" in capsys.readouterr().err
