"""Replays: seconds and tokens that can be counted by hand, and what the plan makes of machines."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fakes import chain_of, fake_engine, greedy, random_rule, run, wild
from forerun.core import Speculation
from forerun.engine.plan import Plan
from forerun.engine.static import Static
from forerun.errors import ConfigError
from forerun.simulate import replay as module
from forerun.simulate.record import Recorder
from forerun.simulate.replay import Result, Row, replay
from forerun.simulate.tables import Drafter, Round, Table, Target, built_in, load_table
from forerun.simulate.traces import Step, Text, Trace, made_up

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
PLAIN = Speculation(enabled=False)
CARD = Table(
    name="a card",
    source="made up",
    target=Target(rows={1: 10.0, 11: 20.0}),  # a further row takes 1 ms
    round=Round(fixed=2.0, depth=1.0),
)


def chain_step(nodes: int, right: int, chance: float = 0.5) -> Step:
    draft = chain_of([0] * nodes, chance)
    return Step(
        parents=tuple(draft.parents),
        survival=tuple(draft.survival),
        accepted=tuple(range(right)),
    )


def text(*steps: Step) -> Text:
    return Text(prompt_tokens=3, steps=steps)


def static(table: Table, trace: Trace, batch: int, nodes: int) -> Result:
    return replay(table, trace, batch, Static(), Speculation(max_draft_tokens=nodes))


def test_a_text_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens: the first is there; 2 of 2 drafted ones are right and bring 3; then one may be
    drafted, is right, and brings the last 2."""
    monkeypatch.setattr(module, "TEXTS_EACH", 1)
    trace = Trace("", [text(chain_step(2, 2), Step(), Step(), chain_step(2, 2), Step())])
    result = static(CARD, trace, 1, nodes=2)
    first, second = (2 + 2 * 1) + (10 + 2), (2 + 1) + (10 + 1)
    assert result.seconds == pytest.approx((first + second) / 1000)
    stats = result.stats
    assert (stats.passes, stats.emitted_tokens, stats.draft_tokens) == (2, 5, 3)
    plain = replay(CARD, trace, 1, Static(), PLAIN)
    assert (plain.seconds, plain.stats.emitted_tokens) == (pytest.approx(0.050), 5)
    assert (plain.stats.drafts, plain.stats.asked) == (0, 0)


def test_texts_run_together_as_long_as_all_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXTS_EACH", 1)
    nothing = Step()
    texts = [text(nothing), text(nothing, nothing, nothing), text(nothing)]
    result = replay(CARD, Trace("", texts), 2, Static(), PLAIN)
    assert result.stats.emitted_tokens == 4, "the second text is alone with its last token"
    assert result.seconds == pytest.approx(2 * 0.011)


def test_of_a_tree_the_likeliest_nodes_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXTS_EACH", 1)
    tree = Step(parents=(-1, 0, -1, 2), survival=(0.6, 0.1, 0.3, 0.2), accepted=(2, 3))
    trace = Trace("", [text(tree, *[Step()] * 9)])
    brought = [static(CARD, trace, 1, nodes).stats.accepted_tokens for nodes in (1, 2, 3, 4)]
    assert brought == [0, 1, 2, 2]


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 16])
def test_static_drafts_bring_what_the_formula_says(nodes: int, batch: int) -> None:
    """Leviathan et al. 2023, equation 1 and theorem 3.8, with a pass that its rows make longer."""
    chance = 0.7
    tokens = (1 - chance ** (nodes + 1)) / (1 - chance)
    plain = 9 + batch
    longer = 9 + batch * (1 + nodes) + 2 + nodes
    trace = made_up([chance] * 8, [chance] * 8)
    result = static(CARD, trace, batch, nodes)
    assert result.stats.tokens_per_pass == pytest.approx(tokens, rel=0.015)
    speed = result.tok_s / replay(CARD, trace, batch, Static(), PLAIN).tok_s
    assert speed == pytest.approx(tokens * plain / longer, rel=0.015)


def test_a_recorded_text_takes_the_passes_of_the_engine_that_it_was_recorded_from() -> None:
    rule = random_rule()
    jobs = [([1, 2, 3], greedy(60))]
    engine = fake_engine(rule, wild(rule), static=True)
    run(engine, jobs)
    recording = fake_engine(rule, wild(rule))
    recorder = recording.plan = Recorder()
    run(recording, jobs)
    found = replay(CARD, Trace("", recorder.texts), 1, Static()).stats
    begun = engine.stats.passes - 1  # the prompt's pass brings the first token
    assert begun < 50
    assert found.passes == module.TEXTS_EACH * begun
    assert found.draft_tokens == module.TEXTS_EACH * engine.stats.draft_tokens
    assert found.accepted_at == [module.TEXTS_EACH * n for n in engine.stats.accepted_at]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("round", [Round(), Round(fixed=1.0, node=0.05), Round(fixed=30.0)])
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(batch: int, round: Round) -> None:
    table = CARD.model_copy(update={"round": round})
    trace = made_up([0.0] * 6, claims=[0.9] * 6)
    plain = replay(table, trace, batch, Static(), PLAIN)
    assert static(table, trace, batch, 6).tok_s < 0.9 * plain.tok_s
    assert replay(table, trace, batch, Plan(table.costs())).tok_s > 0.97 * plain.tok_s


@pytest.mark.parametrize("batch", [1, 32])
def test_always_wrong_with_the_rounds_of_eagle3(batch: int) -> None:
    """Nothing is bought of what is not believed, and what is not bought is not asked for."""
    table = load_table("h100-eagle3")
    trace = made_up([0.0] * 6, claims=[0.9] * 6)
    plain = replay(table, trace, batch, Static(), PLAIN)
    assert replay(table, trace, batch, Plan(table.costs())).tok_s > 0.97 * plain.tok_s


@cache
def rows(name: str) -> list[Row]:
    """Built-in tables at some of the batch sizes for which there are published figures."""
    table = load_table(name)
    drafter = table.drafter
    assert drafter
    trace = made_up(drafter.acceptance, drafter.claims)
    batches = [batch for batch in (2, 32, 64) if batch in {line[0] for line in table.published}]
    budgets = sorted({line[1] for line in table.published})
    return list(module.run(table, trace, batches, budgets))


@pytest.mark.parametrize("name", built_in())
def test_the_plan_is_no_slower_than_plain_or_than_published_settings(name: str) -> None:
    for batch in {row.batch for row in rows(name)}:
        speed = {row.draft: row.speedup for row in rows(name) if row.batch == batch}
        assert speed.pop("plan") > 0.97 * max(speed.values())


def test_the_published_fall_with_the_batch_is_reproduced() -> None:
    found = [row for row in rows("h100-eagle3") if row.published]
    assert [row.batch for row in found] == [2, 32, 64]
    speedups = [row.speedup for row in found]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups == pytest.approx([row.published for row in found], abs=0.16)


@pytest.mark.parametrize("name", built_in())
def test_the_page_shows_these_figures(name: str) -> None:
    for row in rows(name):
        if row.published:
            place = row.draft if name == "mi300x-eagle3" else row.batch
            assert f"\n| {place} | {row.published:.2f} | {row.speedup:.2f} |" in PAGE


def test_a_dear_round_is_not_paid_for() -> None:
    """89 % accepted and 0.44 times as fast as without (see the table's source)."""
    static, *_, plan = [row for row in rows("mi300x-eagle3") if row.draft != "none"]
    assert (static.draft, static.published) == ("1", 0.44)
    assert static.speedup == pytest.approx(0.44, abs=0.005)
    assert static.tokens_per_pass == pytest.approx(1.89, abs=0.02)
    assert plan.plain_share > 0.97


def test_more_claims_than_tokens_are_refused() -> None:
    drafter = Drafter(acceptance=(0.5, 0.5), claimed=(0.9,))
    with pytest.raises(ConfigError, match="give one for each"):
        made_up(drafter.acceptance, drafter.claims)
