from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drafting import make, request
from fakes import chain_of
from forerun.core import Draft, Request, Verdict
from forerun.drafters import Drafter
from forerun.drafters.combined import Combined


class Says(Drafter):
    """Proposes a fixed chain to some requests, and remembers what it was asked and told."""

    def __init__(
        self, name: str, tokens: Sequence[int], ids: Sequence[int], taps: Sequence[int] = ()
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.tokens, self.ids, self.taps = tokens, ids, taps
        self.asked: list[tuple[int, int]] = []
        self.told: list[Sequence[Tensor]] = []
        self.released: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.asked += [(each.id, budget) for each, budget in zip(requests, budgets, strict=True)]
        return [
            chain_of(self.tokens[:budget]) if each.id in self.ids else Draft()
            for each, budget in zip(requests, budgets, strict=True)
        ]

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        self.told.append(taps)

    def release(self, request: Request) -> None:
        self.released.append(request.id)


def test_the_next_is_asked_where_the_first_is_silent() -> None:
    one, two, three = (
        Says("one", [1, 2], [0, 2]),
        Says("two", [5, 6, 7], [0, 1]),
        Says("three", [], []),
    )
    batch = [request([9], id=id) for id in range(4)]
    drafts = Combined([one, two, three]).propose(batch, [2, 3, 1, 4])
    assert [list(draft.tokens) for draft in drafts] == [[1, 2], [5, 6, 7], [1], []]
    assert [list(draft.sources) for draft in drafts] == [["one"] * 2, ["two"] * 3, ["one"], []]
    assert one.asked == [(0, 2), (1, 3), (2, 1), (3, 4)]
    assert two.asked == [(1, 3), (3, 4)]
    assert three.asked == [(3, 4)]


def test_nobody_is_asked_in_vain() -> None:
    one, two = Says("one", [1], [0]), Says("two", [5], [0])
    Combined([one, two]).propose([request([9])], [2])
    assert not two.asked


def test_each_hears_its_own_taps() -> None:
    deep, deaf, wide = Says("deep", [], [], [9]), Says("deaf", [], []), Says("wide", [], [], [2, 5])
    both = Combined([deep, deaf, wide])
    assert both.taps == [2, 5, 9]
    rows = torch.arange(6.0).view(2, 3, 1)  # two rows, three taps
    both.observe([request([9])], [Verdict((), 1)], [rows])
    assert torch.equal(deep.told[0][0], rows[:, [2]])
    assert torch.equal(wide.told[0][0], rows[:, [0, 1]])
    assert list(deaf.told[0]) == []


def test_who_is_not_followed_is_told_of_to_those_alone_who_need_no_taps() -> None:
    deep, deaf = Says("deep", [], [], [9]), Says("deaf", [], [])
    both, asked = Combined([deep, deaf]), [request([9], id=id) for id in range(2)]
    both.observe(asked, [Verdict((), 1)] * 2, [torch.zeros(0, 1, 1), torch.ones(2, 1, 1)])
    assert torch.equal(deep.told[0][0], torch.ones(2, 1, 1))
    assert len(deep.told) == len(deaf.told) == 1
    both.observe(asked, [Verdict((), 1)] * 2, ())
    assert (len(deep.told), len(deaf.told)) == (1, 2)


def test_it_can_what_one_of_them_can() -> None:
    assert taking_turns("ngram+suffix").makes_trees
    assert not taking_turns("ngram+ngram:min=3").makes_trees
    assert not taking_turns("ngram+suffix").samples
    both = taking_turns("ngram:min=3,min_prob=0+suffix")
    drafts = both.propose([request([1, 2, 3, 4, 1, 2, 3]), request([1, 2, 3, 4, 2], id=1)], [4, 4])
    assert [set(draft.sources) for draft in drafts] == [{"ngram"}, {"suffix"}]


def taking_turns(spec: str) -> Drafter:
    return make(spec, independent_noise=True)


@pytest.mark.parametrize("asked", [True, False])
def test_all_forget_a_request(asked: bool) -> None:
    one, two = Says("one", [1], [0]), Says("two", [5], [0])
    both = Combined([one, two])
    if asked:
        both.propose([request([9])], [2])
    both.release(request([9]))
    assert one.released == two.released == [0]
