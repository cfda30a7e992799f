"""Where fetched models and built kernels are kept, and how files are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.home import cache_folder, written_whole


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("FORERUN_HOME")
    assert cache_folder() == Path("/b/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/forerun"


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "file"

    def write(text: str, room: int) -> None:
        with written_whole(file) as fresh:
            fresh.write_text(text[:room])
            if room < len(text):
                raise OSError("full")

    write("old", 9)
    with pytest.raises(OSError, match="full"):
        write("something new", 9)
    assert file.read_text() == "old"
    assert [entry.name for entry in file.parent.iterdir()] == ["file"]
