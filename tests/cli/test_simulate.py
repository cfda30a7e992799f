"""`forerun simulate`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.simulate.tables import built_in


def test_published_settings_stand_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "mi300x-eagle3", "--static", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(row["batch"], row["draft"], row["published"]) for row in found["rows"]] == [
        (32, "none", None),
        (32, "1", 0.44),
        (32, "plan", None),
    ]
    assert found["meta"]["table"]["target"]["rows"] == {"1": 9.065}
    for part in ("Qwen3-8B on an MI300X", "0.44x", "Source: ", "Fitted: ", "Assumed: "):
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h100"], "did you mean 'h100-eagle'?"),
        (["h100-eagle", "--batch", "1;2"], "--batch 1;2: write numbers with commas"),
        (["h100-eagle", "--static", "0"], "--static 0"),
        (["h100-eagle", "--batch", "0,1"], "--batch 0,1"),
        (["h100-eagle", "--static", "65"], "--static 65"),
        (["h100-eagle", "--trace", "/no/such"], "cannot read /no/such"),
        (["h100-eagle", "--json", "."], ". is a folder"),
    ],
)
def test_what_cannot_be_used_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_table_without_a_drafter_needs_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "card.toml"
    table.write_text('name = "a card"\nsource = "made up"\n[target]\nrows = { 1 = 9.0 }\n')
    assert main(["simulate", str(table)]) == 1
    assert "has no [drafter]" in capsys.readouterr().err


def test_the_help_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in built_in())
