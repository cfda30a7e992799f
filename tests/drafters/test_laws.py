from __future__ import annotations

import pytest

from forerun.core import Draft
from forerun.drafters.laws import SILENT, of_draft, of_places


def test_a_draft_is_a_law_at_its_nodes() -> None:
    law = of_draft(Draft([5, 6, 7, 8], [-1, 0, 0, -1], [0.8, 0.4, 0.2, 0.1]))
    assert dict(law.successors(law.root)) == pytest.approx({5: 0.8, 8: 0.1})
    five = law.advance(law.root, 5)
    assert dict(law.successors(five)) == pytest.approx({6: 0.5, 7: 0.25})
    assert (law.nodes, law.depth) == (4, 4)


@pytest.mark.parametrize("way", [[8], [5, 6], [9], [9, 5], [5, 9, 6]])
def test_elsewhere_it_knows_nothing(way: list[int]) -> None:
    law = of_draft(Draft([5, 6, 7, 8], [-1, 0, 0, -1], [0.8, 0.4, 0.2, 0.1]))
    state = law.root
    for token in way:
        state = law.advance(state, token)
    assert not list(law.successors(state))


def test_no_draft_is_silence() -> None:
    assert of_draft(Draft()) is SILENT
    assert not list(SILENT.successors(SILENT.advance(SILENT.root, 3)))


def test_a_node_that_cannot_be_reached_has_children_without_a_chance() -> None:
    law = of_draft(Draft([5, 6], [-1, 0], [0.0, 0.0]))
    assert list(law.successors(law.advance(law.root, 5))) == [(6, 0.0)]


def test_places_do_not_look_at_tokens() -> None:
    law = of_places([[(1, 0.5)], [(2, 0.4), (3, 0.3)]], nodes=6)
    for token in (1, 9):
        assert list(law.successors(law.advance(law.root, token))) == [(2, 0.4), (3, 0.3)]
    assert (law.nodes, law.depth) == (6, 2)
