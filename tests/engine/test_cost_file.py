"""Costs of passes from one start to the next: kept, found again, and measured where that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fakes import FakeTarget, random_rule
from forerun.engine.cost_file import measure, source


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.delenv("FORERUN_COSTS")
    return tmp_path / "costs"


def start(slots: int = 128, **info: object) -> FakeTarget:
    """A target whose costs were asked for."""
    target = FakeTarget(random_rule())
    target.info = replace(target.info, **info)
    store = target.new_store(slots)
    measure(target, store)
    assert store.free_slots == store.slots
    return target


def test_a_second_start_measures_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = start(), start()
    assert {1, 8, 32} <= set(first.passes)
    assert second.passes == []
    (path,) = folder.iterdir()
    assert path.name.startswith("fake-float32-")
    assert source(first) == f"measured, and kept in {path} from now on"
    assert source(second) == f"kept in {path}"
    costs = [measure(target, target.new_store(128)) for target in (first, second)]
    assert [costs[0][rows] for rows in (1, 9, 70)] == [costs[1][rows] for rows in (1, 9, 70)]
    assert costs[0].seconds([50, 9], [1, 3]) == costs[1].seconds([50, 9], [1, 3])
    assert capsys.readouterr().err == ""


def test_a_target_is_measured_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FORERUN_COSTS", "0")
    target = FakeTarget(random_rule())
    assert source(target) is None
    store = target.new_store(128)
    first = measure(target, store)
    passes = len(target.passes)
    assert measure(target, store)[8] == first[8]
    assert len(target.passes) == passes > 0
    assert source(target) == "measured"
    assert not folder.exists()


def test_what_costs_depend_on_is_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    for info in ({"name": "org/other"}, {"dtype": torch.bfloat16}, {"layers": 3}):
        assert start(**info).passes
    assert start(slots=64).passes, "other prefixes"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert start().passes
    monkeypatch.setattr("forerun.models.kernels.processor", lambda: "another machine")
    assert start().passes
    monkeypatch.setattr(FakeTarget, "backend", SimpleNamespace(build="other"), raising=False)
    assert start().passes, "other kernels"
    assert len(list(folder.iterdir())) == 8


def test_a_file_of_another_version_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    monkeypatch.setattr("forerun.versions.version", lambda package: "99")
    assert start().passes
    err = capsys.readouterr().err
    assert "it has other versions); measuring again" in err
    assert err.count("\n") == 1
    assert start().passes == []
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"seconds": 3}'])
def test_a_broken_file_is_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    start()
    (path,) = folder.iterdir()
    path.write_bytes(content.encode("latin-1"))
    assert start().passes
    err = capsys.readouterr().err
    assert f"{path} is of no use" in err
    assert err.count("\n") == 1
    assert start().passes == []


@pytest.mark.parametrize("seconds", [0, -1, "NaN", "x", None])
def test_times_that_cannot_be_are_not_believed(folder: Path, seconds: object) -> None:
    start()
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    record["seconds"][0][-1] = seconds
    path.write_text(json.dumps(record))
    assert start().passes


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    target = start()
    assert target.passes
    assert "cannot be kept in" in str(source(target))
