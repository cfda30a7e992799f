"""Tables of costs: what they say in seconds, where they are from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.simulate.tables import Round, Table, Target, built_in, load_table

TINY = """
name = "a card"
source = "made up"
[target]
rows = { 1 = 10.0, 11 = 20.0 }
sequence = 2.0
key = 0.01
row_key = 0.001
[round]
fixed = 3.0
depth = 0.5
node = 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "card.toml"
    path.write_text(TINY)
    return path


def test_costs_are_those_of_the_file_in_seconds(file: Path) -> None:
    table = load_table(str(file))
    costs = table.costs()
    assert [costs[1], costs[6], costs[21]] == pytest.approx([0.010, 0.015, 0.030])
    passed = 13.0 + 2.0 + 0.01 * 300 + 0.001 * (100 * 1 + 200 * 3)  # 4 rows of 2 sequences
    assert costs.seconds([100, 200], [1, 3]) == pytest.approx(passed / 1000)
    assert table.round_seconds(depth=4, nodes=6) == pytest.approx((3.0 + 2.0 + 1.5) / 1000)


@pytest.mark.parametrize("name", built_in())
def test_built_in_tables_say_where_their_figures_are_from(name: str) -> None:
    table = load_table(name)
    assert all(len(part) > 40 for part in (table.source, table.fitted, table.assumed))
    assert table.drafter
    assert len(table.published) >= 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[round]", "[rounds]"), "table has no 'rounds'; did you mean 'round'?"),
        (("fixed = 3.0", "fixed = -3.0"), "[round]: fixed"),
        (("{ 1 = 10.0, 11 = 20.0 }", "{}"), "give the milliseconds of 1 row"),
        (('name = "a card"', ""), "table: name"),
        (("[target]", "[target"), "give a file in TOML"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    file: Path, change: tuple[str, str], message: str
) -> None:
    file.write_text(TINY.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_table(str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100-eagle3'"):
        load_table("h100-eagle-3")


def test_what_is_not_said_costs_nothing() -> None:
    table = Table(name="a", source="b", target=Target(rows={1: 1.0}))
    assert table.round == Round()
    assert table.round_seconds(9, 9) == 0
    assert table.costs().seconds([5, 5], [3, 3]) == pytest.approx(0.001)
