"""The line that says why a draft pays, or why not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from forerun.tune.bench import Row
from forerun.tune.explain import explain


def row(**values: Any) -> Row:
    """Plain decoding at 10 ms a pass, but for `values`."""
    known: dict[str, Any] = {field.name: None for field in fields(Row)}
    known |= {"spec": "ngram", "workload": "mix", "batch": 1, "rows_per_pass": 1.0}
    known |= {"acceptance_length": 1.0, "plain_share": 1.0}
    known |= {"draft_ms": 0.0, "verify_ms": 9.5, "other_ms": 0.5}
    return Row(**{**known, **values})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "nothing was drafted"),
        ({"plain_share": 0.5, "acceptance_length": 2.4, "break_even": 1.5}, "1.50 is break-even."),
        ({"plain_share": 0.97, "acceptance_length": 1.2, "break_even": 1.5}, "asked for none"),
        (
            {"plain_share": 0.2, "acceptance_length": 1.2, "break_even": 1.5, "draft_ms": 4.0},
            "drafting takes 4.00 ms a pass",
        ),
        (
            {"plain_share": 0.2, "acceptance_length": 1.2, "break_even": 1.5, "verify_ms": 11.0},
            "more of the drafted tokens would have to be right",
        ),
        (
            {"plain_share": 0, "acceptance_length": 1.2, "break_even": 1.5, "verify_ms": 11.0}
            | {"batch": 8, "rows_per_pass": 4.0},
            "4.0 rows a pass and sequence take 1.50 ms more than one: with fewer sequences",
        ),
        (
            {"plain_share": 0, "acceptance_length": 1.2, "break_even": 1.5, "other_ms": 3.0},
            "bookkeeping take 2.50 ms a pass more than plain",
        ),
    ],
)
def test_a_line_names_the_obstacle(values: dict[str, Any], says: str) -> None:
    assert says in explain(row(**values), row(spec="none"))
