"""Building the compiled kernels: cached, once per command, and never silently a worse one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.models import kernels


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[list[str]]]:
    """The commands that would have been run; each writes an empty library."""
    seen: list[list[str]] = []

    def run(command: list[str]) -> None:
        seen.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_run", run)
    kernels.library.cache_clear()
    yield seen
    monkeypatch.undo()
    kernels.library.cache_clear()


def test_built_once(commands: list[list[str]]) -> None:
    assert kernels._build("cc") == kernels._build("cc")
    assert len(commands) == 1
    assert "-fopenmp" in commands[0]


def test_another_compiler_is_another_library(commands: list[list[str]]) -> None:
    assert kernels._build("cc") != kernels._build("clang")


def test_without_openmp_on_one_thread(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kernels._run

    def knows_no_openmp(command: list[str]) -> None:
        if "-fopenmp" in command:
            raise subprocess.CalledProcessError(1, command)
        run(command)

    monkeypatch.setattr(kernels, "_run", knows_no_openmp)
    kernels._build("cc")
    assert "-fopenmp" not in commands[0]


def test_a_build_that_is_cut_short_leaves_nothing_behind(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hangs(command: list[str]) -> None:
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(kernels, "_run", hangs)
    assert kernels.library() is None
    assert not list(tmp_path.rglob("*.so"))
