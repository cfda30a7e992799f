"""Files of lines that survive a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.train.jsonl import Journal, read_records

WHOLE = b'{"a": "\xc3\xa9\xe2\x80\xa8"}\n{"b": 2}\n'  # with a separator that ends no line


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_half_a_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE[:cut])
    with Journal(path) as journal:
        kept = [record for _, record in read_records(path)]
        journal.append({"c": 3})
    first = WHOLE.index(b"\n")
    records = [{"a": "é\u2028"}, {"b": 2}]
    assert kept == records[: (cut >= first) + (cut >= len(WHOLE) - 1)]
    assert [record for _, record in read_records(path)] == [*kept, {"c": 3}]
    assert path.read_bytes().endswith(b"\n")


def test_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    long = b'"' + b"x" * 200_000 + b'"'
    path.write_bytes(long + b"\n" + long[:-1])
    Journal(path).__exit__()
    assert path.read_bytes() == long + b"\n"


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    with Journal(path) as journal:
        journal.append([1])
        assert path.read_text() == "[1]\n"


def test_broken_lines_and_places(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('1\n\n{"a"\n')
    with pytest.raises(ConfigError, match=r"in\.jsonl line 3 is not JSON"):
        list(read_records(path))
    path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_records(path))
    with pytest.raises(ConfigError, match="cannot write"):
        Journal(tmp_path)
