"""`forerun train corpus` on a model of a few thousand weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main
from tiny import tiny_folder


def test_counted_answers_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, out = tiny_folder(tmp_path / "m"), tmp_path / "data.jsonl", tmp_path / "c"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "abcabcabc"}]
    data.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(3)))
    command = ["train", "corpus", "--model", str(model), "--data", str(data), "--out", str(out)]
    assert main([*command, "--size", "64KB"]) == 0
    assert "30 tokens counted" in capsys.readouterr().err  # the end of a turn is one, too
    assert out.stat().st_size <= 64_000
    run = ["generate", "abc", "--model", str(model), "--draft", f"corpus:{out}"]
    assert main([*run, "--max-tokens", "8", "--temperature", "0"]) == 0
    capsys.readouterr()
    assert main([*command, "--size", "big"]) == 1
    assert "write for example 8MB" in capsys.readouterr().err
    assert main([*command, "--size", "1KB"]) == 1
    assert "no corpus fits" in capsys.readouterr().err
