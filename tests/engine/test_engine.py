"""The step as a whole, over a target that reads everything it knows from the store."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import (
    FREE,
    FakeTarget,
    Rule,
    ScriptedDrafter,
    fake_engine,
    greedy,
    greedy_path,
    random_rule,
    right,
    run,
    script_rule,
    wild,
    wrong,
)
from forerun.core import PHASES, Draft, Request, SamplingParams, Verdict
from forerun.engine.costs import Costs
from forerun.engine.engine import Engine, seed_of
from forerun.engine.plan import Plan
from forerun.errors import ConfigError, PromptError
from forerun.verify import make_verifier
from tiny import END

RULE = random_rule()
DEEP = random_rule(memory=None)  # the answer depends on every slot of the prefix
JOBS = [([1, 2, 3], 30), ([4] * 70, 12), ([5], 25), ([6, 7], 1), ([3, 2, 1], 40)]


def jobs(**values: object) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, greedy(length, **values)) for prompt, length in JOBS]


@pytest.mark.parametrize("rule", [RULE, DEEP], ids=["short", "deep"])
@pytest.mark.parametrize("rows", [5, 16, 512])
@pytest.mark.parametrize("script", [None, right, wrong, wild])
def test_greedy_text_is_the_target_s_own(rule: Rule, rows: int, script: object) -> None:
    """With drafts that are right, wrong or both; prompts in chunks; several at once."""
    engine = fake_engine(rule, script and script(rule), max_batch_rows=rows, max_num_seqs=4)
    outputs = run(engine, jobs())
    assert outputs == [greedy_path(rule, prompt, length) for prompt, length in JOBS]
    assert max(engine.target.passes) <= rows


@pytest.mark.parametrize("script", [right, wrong, wild])
def test_sampled_text_is_that_of_plain_decoding(script: object) -> None:
    sampled = [
        (prompt, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=length, seed=9))
        for prompt, length in JOBS
    ]
    plain = run(fake_engine(DEEP), sampled)
    assert run(fake_engine(DEEP, script(DEEP)), sampled) == plain
    assert plain != run(
        fake_engine(DEEP), [(p, s.model_copy(update={"seed": 8})) for p, s in sampled]
    )


def test_a_draft_that_is_always_right_saves_its_passes() -> None:
    engine = fake_engine(RULE, right(RULE, nodes=4))
    run(engine, [([1, 2, 3], greedy(21))])
    stats = engine.stats
    # the prompt's pass brings one token, then four passes bring 4 + 1 each
    assert (stats.passes, stats.drafts, stats.draft_tokens) == (5, 4, 16)
    assert (stats.accepted_tokens, stats.emitted_tokens) == (16, 21)
    assert stats.accepted_at == [4, 4, 4, 4]
    assert stats.acceptance_length == 5


def test_a_draft_that_is_always_wrong_saves_none() -> None:
    engine = fake_engine(RULE, wrong(RULE))
    run(engine, [([1, 2, 3], greedy(21))])
    assert (engine.stats.passes, engine.stats.accepted_tokens) == (21, 0)
    assert engine.stats.draft_tokens > 0


def test_duplicate_siblings_do_not_hide_the_right_one() -> None:
    """The right token twice, and only the second has the right child."""

    def script(request: Request, budget: int) -> Draft:
        first, second = greedy_path(RULE, request.tokens, 2)
        tokens = [first, (second + 1) % 16, first, second]
        return Draft(tokens, [-1, 0, -1, 2], [0.9, 0.5, 0.9, 0.5]) if budget > 3 else Draft()

    engine = fake_engine(RULE, script)
    (output,) = run(engine, [([1, 2], greedy(30))])
    assert output == greedy_path(RULE, [1, 2], 30)
    assert engine.stats.accepted_tokens == 2 * engine.stats.drafts


def test_max_tokens_inside_an_accepted_path() -> None:
    """The budget stops drafts at the limit; a drafter of a longer tree loses nothing either."""
    for limit in range(1, 12):
        (output,) = run(fake_engine(RULE, right(RULE, nodes=9)), [([1, 2], greedy(limit))])
        assert output == greedy_path(RULE, [1, 2], limit)


TEXT = "one, two, three; naïve 日本, four, five"


def text_engine(draft: bool, text: str = TEXT, **options: object) -> Engine:
    rule = script_rule(1, list(text.encode()))
    return fake_engine(rule, right(rule, nodes=7) if draft else None, tokenizer=True, **options)


def stream(engine: Engine, params: SamplingParams) -> tuple[str, list[int], str | None]:
    (generation,) = engine.add([65], params)
    deltas = []
    while engine.busy:
        deltas += engine.step()
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == generation.request.output
    assert engine.stats.emitted_tokens == len(tokens)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return "".join(delta.text for delta in deltas), tokens, deltas[-1].finish_reason


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("values", "text", "length", "reason"),
    [
        ({}, TEXT, len(TEXT.encode()) + 1, "stop"),
        ({"stop": "three"}, "one, two, ", 15, "stop"),
        ({"stop": ", t"}, "one", 6, "stop"),
        ({"stop": ", t", "min_tokens": 7}, "one, two", 11, "stop"),
        ({"stop_token_ids": [ord(";")]}, "one, two, three", 16, "stop"),
        ({"max_tokens": 12}, "one, two, th", 12, "length"),
        ({"ignore_eos": True, "max_tokens": 60}, TEXT, 60, "length"),
    ],
)
def test_the_end_may_lie_inside_an_accepted_path(
    draft: bool, values: dict[str, object], text: str, length: int, reason: str
) -> None:
    engine = text_engine(draft, stop_ids=frozenset([END]))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 100, **values})
    output, tokens, why = stream(engine, params)
    assert (output, len(tokens), why) == (text, length, reason)
    if draft:
        assert engine.stats.passes < length / 3


def test_a_stop_string_spans_two_steps() -> None:
    engine = text_engine(draft=True)
    engine.add([65], greedy(100, stop="two, three"))  # bytes 5 to 14; the first step ends at 7
    texts = []
    while engine.busy:
        texts += [(delta.text, len(delta.token_ids)) for delta in engine.step()]
    assert texts == [("one, ", 8), ("", 7)]


def test_sources_say_who_proposed_each_token() -> None:
    engine = fake_engine(RULE, right(RULE, nodes=2))
    engine.add([1, 2], greedy(7))
    sources = []
    while engine.busy:
        sources += [delta.sources for delta in engine.step()]
    assert sources == [[""], ["script", "script", ""], ["script", "script", ""]]


def test_a_draft_may_name_its_sources_per_node() -> None:
    def script(request: Request, budget: int) -> Draft:
        tokens = greedy_path(RULE, request.tokens, 2)
        return Draft([9, *tokens], [-1, -1, 1], [0.5] * 3, sources=["x", "a", "b"])

    engine = fake_engine(RULE, script)
    engine.add([1, 2], greedy(6))
    engine.step()
    assert engine.step()[0].sources == ["a", "b", ""]


@pytest.mark.parametrize("script", [None, wild])
@pytest.mark.parametrize("slots", [110, 210, 1000])
def test_preemption_does_not_change_the_text(script: object, slots: int) -> None:
    many = [([i, i + 1, i + 2] * (10 + 2 * i), greedy(40)) for i in range(6)]
    engine = fake_engine(DEEP, script and script(DEEP), slots=slots, max_batch_rows=64)
    preempted = []
    schedule = engine.scheduler.schedule

    def spy() -> object:
        batch = schedule()
        preempted.extend(batch.preempted)
        return batch

    engine.scheduler.schedule = spy  # type: ignore[method-assign, assignment]
    outputs = run(engine, many)
    assert outputs == [greedy_path(DEEP, prompt, p.max_tokens) for prompt, p in many]
    assert bool(preempted) == (slots < 1000)
    if script:
        expected = sorted([*range(6), *(request.id for request in preempted)])
        assert sorted(engine.drafter.released) == expected


def test_a_full_store_shortens_budgets_and_drops_no_draft() -> None:
    """A draft has room for all it was asked for, whatever its length turns out to be."""
    budgets, nodes = [], []

    def script(request: Request, budget: int) -> Draft:
        draft = right(DEEP, nodes=20)(request, budget)
        budgets.append(budget)
        nodes.append(len(draft))
        return draft

    many = [([i, i + 1, i + 2] * (10 + 2 * i), greedy(40)) for i in range(6)]
    engine = fake_engine(DEEP, script, slots=210, max_batch_rows=128)
    outputs = run(engine, many)
    assert outputs == [greedy_path(DEEP, prompt, 40) for prompt, _ in many]
    assert engine.stats.draft_tokens == sum(nodes)
    assert sum(0 < budget < 20 for budget in budgets) > 1, "the store was full at times"


def test_new_requests_join_while_others_run() -> None:
    engine = fake_engine(DEEP, wild(DEEP), max_num_seqs=2)
    streams = []
    for step in range(200):
        if step % 3 == 0 and step < 24:
            streams += engine.add([step % 16, 1], greedy(15))
        engine.step()
    assert not engine.busy
    for i, generation in enumerate(streams):
        assert generation.request.output == greedy_path(DEEP, [3 * i % 16, 1], 15)


def test_the_drafter_sees_the_taps_of_all_rows_that_stay() -> None:
    """A tap of the fake target is the row's token."""
    drafter = ScriptedDrafter(wild(DEEP), taps=(0, 2))
    target = FakeTarget(DEEP)
    engine = Engine(
        target,
        store=target.new_store(512),
        verifier=make_verifier("follow"),
        drafter=drafter,
        max_batch_rows=8,
        max_num_seqs=3,
        costs=FREE,
    )
    prompts = [[1, 2, 3] * 7, [4], [5, 6]]
    streams = [engine.add(prompt, greedy(20))[0] for prompt in prompts]
    truth = {
        s.request.id: [*p, *greedy_path(DEEP, p, 20)] for s, p in zip(streams, prompts, strict=True)
    }
    seen: dict[int, list[float]] = {0: [], 1: [], 2: []}
    while engine.busy:
        engine.step()
    for id, verdict, taps in drafter.observed:
        assert taps is not None
        assert taps.shape[1:] == (2, 1)
        seen[id] += taps[:, 0, 0].tolist()
        assert isinstance(verdict, Verdict)
        assert verdict.next_token == truth[id][len(seen[id])]
    for id, tokens in seen.items():
        assert tokens == truth[id][: len(tokens)]
        assert len(tokens) >= len(truth[id]) - 11, "all but the last pass"


def test_without_speculation_nothing_is_drafted_tapped_or_told() -> None:
    drafter = ScriptedDrafter(right(DEEP), taps=(0,))
    target = FakeTarget(DEEP)
    engine = Engine(
        target,
        store=target.new_store(512),
        verifier=make_verifier("follow"),
        drafter=drafter,
        costs=FREE,
    )
    tapped = []
    forward = target.forward

    def spy(segments, store, taps=()):  # type: ignore[no-untyped-def]
        tapped.append(len(taps))
        return forward(segments, store, taps)

    target.forward = spy  # type: ignore[method-assign, assignment]
    params = greedy(20, speculation={"enabled": False})
    assert run(engine, [([1, 2], params)]) == [greedy_path(DEEP, [1, 2], 20)]
    assert (engine.stats.asked, engine.stats.drafts, drafter.observed) == (0, 0, [])
    assert tapped == [0] * 20
    assert run(engine, [([1, 2], greedy(20))]) == [greedy_path(DEEP, [1, 2], 20)]
    assert engine.stats.drafts > 0
    assert set(tapped[20:]) == {1}


def test_a_request_may_limit_what_is_drafted_for_it() -> None:
    engine = fake_engine(DEEP, right(DEEP, nodes=9))
    params = greedy(21, speculation={"max_draft_tokens": 3})
    assert run(engine, [([1, 2], params)]) == [greedy_path(DEEP, [1, 2], 21)]
    assert engine.stats.draft_tokens == 3 * engine.stats.drafts == 15


def test_the_time_of_a_step_is_told_by_phase() -> None:
    engine = fake_engine(DEEP, right(DEEP))
    run(engine, [([1, 2], greedy(30))])
    stats = engine.stats
    phases = [getattr(stats, f"{phase}_seconds") for phase in PHASES]
    assert min(phases) > 0
    assert sum(phases) == pytest.approx(stats.step_seconds, rel=0.2)
    assert stats.predicted_seconds > 0


def test_aborting_gives_everything_back_and_disturbs_nobody() -> None:
    engine = fake_engine(DEEP, wild(DEEP), max_num_seqs=2)
    first, second, waiting = (engine.add([i, 1], greedy(20))[0] for i in range(3))
    for _ in range(3):
        engine.step()
    engine.abort(first.request.id)
    engine.abort(waiting.request.id)
    engine.abort(12345)
    while engine.busy:
        assert {delta.request_id for delta in engine.step()} <= {second.request.id}
    assert second.request.output == greedy_path(DEEP, [1, 1], 20)
    assert first.request.finish_reason == "abort"
    assert engine.store.free_slots == engine.store.slots


def test_logprobs_are_cut_with_the_tokens_and_do_not_depend_on_drafts() -> None:
    def all_logprobs(script: object) -> list[object]:
        rule = random_rule(vocab=16, memory=None)
        engine = fake_engine(rule, script and script(rule))
        engine.add([1, 2], SamplingParams(temperature=0.7, seed=4, max_tokens=20, logprobs=3))
        found = []
        while engine.busy:
            for delta in engine.step():
                assert delta.logprobs is not None
                assert len(delta.logprobs) == len(delta.token_ids)
                found += zip(delta.token_ids, delta.logprobs, strict=True)
        return found

    plain = all_logprobs(None)
    path = (1, 2)
    for token, logprobs in plain:
        expected = random_rule(vocab=16, memory=None)(path).log_softmax(-1)
        assert logprobs.chosen == pytest.approx(expected[token].item(), abs=1e-5)
        assert list(logprobs.top) == expected.topk(3).indices.tolist()
        path = (*path, token)
    assert all_logprobs(wild) == plain
    assert all_logprobs(right) == plain


def test_several_outputs_of_one_prompt_have_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    outputs = run(fake_engine(DEEP), [([1, 2], params)])
    assert len(set(map(tuple, outputs))) == 3
    for index, output in enumerate(outputs):
        alone = SamplingParams(seed=seed_of(5, index), max_tokens=12)
        assert run(fake_engine(DEEP), [([1, 2], alone)]) == [output]
    assert seed_of(5, 0) == 5


def test_without_a_seed_a_fresh_one_is_drawn_and_kept() -> None:
    engine = fake_engine(DEEP)
    first, second = (engine.add([1, 2], SamplingParams(max_tokens=12))[0].request for _ in "ab")
    while engine.busy:
        engine.step()
    assert first.seed != second.seed
    params = SamplingParams(max_tokens=12, seed=first.seed)
    assert run(fake_engine(DEEP), [([1, 2], params)]) == [first.output]


def test_min_tokens_puts_the_end_off() -> None:
    rule = script_rule(1, [9, 8])
    outputs = run(fake_engine(rule, stop_ids=frozenset([END])), [([1], greedy(9, min_tokens=5))])
    assert len(outputs[0]) == 6
    assert outputs[0][-1] == END
    assert END not in outputs[0][:5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 40, "has 40 tokens and fake has room for 40, answer included; shorten it"),
        ([1, 16], "token ids outside 0 to 15"),
        ([-1], "token ids outside 0 to 15"),
    ],
)
def test_prompts_that_can_never_be_served_are_refused(prompt: list[int], message: str) -> None:
    engine = fake_engine(RULE, max_length=40)
    with pytest.raises(PromptError, match=message):
        engine.add(prompt, greedy(5))
    assert not engine.busy


def test_a_store_smaller_than_the_model_is_named() -> None:
    with pytest.raises(PromptError, match="raise kv_tokens"):
        fake_engine(RULE, slots=30).add([1] * 30, greedy(5))


@pytest.mark.parametrize(("slots", "max_length"), [(512, 40), (40, 512)])
def test_max_tokens_ends_where_the_model_or_the_store_does(slots: int, max_length: int) -> None:
    engine = fake_engine(DEEP, right(DEEP), slots=slots, max_length=max_length)
    (generation,) = engine.add([1] * 10, greedy(100))
    while engine.busy:
        engine.step()
    assert generation.request.output == greedy_path(DEEP, [1] * 10, 30)
    assert generation.request.finish_reason == "length"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"stop_token_ids": [16]}, "stop_token_ids names token 16; use ids from 0 to 15"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias names token -1"),
    ],
)
def test_parameters_that_do_not_suit_the_model_are_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fake_engine(RULE).add([1], greedy(5, **values))


def test_taps_that_the_target_does_not_have_are_refused() -> None:
    target = FakeTarget(RULE)
    with pytest.raises(ConfigError, match="layer boundary 3, but fake has 2 layers"):
        Engine(
            target,
            store=target.new_store(64),
            verifier=make_verifier("follow"),
            drafter=ScriptedDrafter(right(RULE), taps=(1, 3)),
            costs=FREE,
        )


def test_costs_are_measured_when_there_is_a_drafter() -> None:
    target = FakeTarget(RULE)
    store = target.new_store(64)
    engine = Engine(
        target,
        store=store,
        verifier=make_verifier("follow"),
        drafter=ScriptedDrafter(right(RULE)),
    )
    assert {1, 8, 32} <= set(target.passes)
    assert store.free_slots == store.slots
    assert run(engine, [([1, 2], greedy(9))]) == [greedy_path(RULE, [1, 2], 9)]


def test_seconds_are_shared_among_those_who_decode() -> None:
    engine = fake_engine(RULE, right(RULE))
    streams = [engine.add([i, 1], greedy(20))[0] for i in range(3)]
    emitted = 0
    for step in range(99):
        if step == 3:
            engine.abort(streams[1].request.id)
        emitted += sum(len(delta.token_ids) for delta in engine.step())
    assert not engine.busy
    for name in ("draft_seconds", "forward_seconds", "step_seconds"):
        total = sum(getattr(generation.stats, name) for generation in streams)
        assert total == pytest.approx(getattr(engine.stats, name))
        assert total > 0
    assert engine.stats.emitted_tokens == emitted < 60


def test_nothing_to_do_is_no_step() -> None:
    engine = fake_engine(RULE)
    assert engine.step() == []


def test_rows_of_a_prompt_leave_no_budget_and_lose_no_draft() -> None:
    """A chain proposed beside a long prompt must fit into what the prompt left."""
    rule = random_rule(memory=3)
    engine = fake_engine(rule, right(rule, nodes=9), max_batch_rows=12, max_num_seqs=2)
    assert run(engine, [([1, 2], greedy(30)), ([3] * 50, greedy(10))]) == [
        greedy_path(rule, [1, 2], 30),
        greedy_path(rule, [3] * 50, 10),
    ]
    assert max(engine.target.passes) <= 12


@pytest.mark.parametrize("reads", [False, True])
def test_a_plan_that_asks_nobody_is_not_asked_itself(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """But for one step in some, and to find out whether it should again."""
    rule, budgets = random_rule(memory=3), Plan.budgets
    decided: list[list[int]] = []

    def count(plan: Plan, *args: Any) -> list[int]:
        decided.append(budgets(plan, *args))
        return decided[-1]

    monkeypatch.setattr(Plan, "budgets", count)
    monkeypatch.setattr("forerun.engine.probing.PROBES", 0.05)  # a short text is enough
    target = FakeTarget(rule)
    drafter = ScriptedDrafter(wrong(rule), taps=[1] if reads else [])
    engine = Engine(
        target,
        store=target.new_store(512),
        verifier=make_verifier("follow"),
        drafter=drafter,
        costs=Costs({1: 1e-4, 11: 2e-4}),
    )
    prompts = [[id, 1, 2] for id in range(12)]
    truth = [greedy_path(rule, prompt, 400) for prompt in prompts]
    for prompt, expected in zip(prompts, truth, strict=True):
        assert run(engine, [(prompt, greedy(400))]) == [expected]
    assert len(decided) < 12 * 400 / 3
    # Of texts that are read for drafts, few are followed where that does not pay.
    assert reads or sum(map(sum, decided[len(decided) // 2 :])) > 0, "it is looked at again"
