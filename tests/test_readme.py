"""The README's commands do what a reader will see when pasting them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
FORERUN = [command for command in COMMANDS if not command.startswith("make ")]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run as a reader would, with the environment of these tests activated."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_there_is_something_to_run() -> None:
    assert {"make demo", "make test"} <= set(MAKE)
    assert len(FORERUN) >= 5


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_the_target(command: str) -> None:
    # not for real: that would run these tests within these tests
    result = run([*command.split(), "--dry-run"], ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.real
@pytest.mark.parametrize("command", FORERUN)
def test_command_runs(command: str, tmp_path: Path) -> None:
    result = run(["bash", "-euo", "pipefail", "-c", command], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Traceback" not in result.stderr


@pytest.mark.real
def test_python_example_runs(tmp_path: Path) -> None:
    examples = [block for language, block in BLOCKS if language == "python"]
    assert examples
    for example in examples:
        result = run([sys.executable, "-W", "error", "-c", example], tmp_path)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout) > 40


def test_links_to_files_lead_somewhere() -> None:
    for name in re.findall(r"`((?:docs|bench|scripts)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name
