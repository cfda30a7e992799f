"""Where fetched models and built kernels are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.home import cache_folder


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("FORERUN_HOME")
    assert cache_folder() == Path("/b/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/forerun"
