"""Requests that say which of the loaded drafters they want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes import ScriptedDrafter, fake_engine, greedy, random_rule, right, run, wrong
from forerun.core import SamplingParams
from forerun.drafters.combined import Combined
from forerun.drafters.joined import Joined
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from tiny import tiny_llama

RULE = random_rule()
PROMPT = [3, 1, 4, 1, 5]


class Good(ScriptedDrafter):
    name = "good"


class Bad(ScriptedDrafter):
    name = "bad"


def engine(kind: type[Combined] = Joined, **options: Any) -> tuple[Engine, Good, Bad]:
    """With a drafter that is always right and reads hidden states, and one that never is."""
    good, bad = Good(right(RULE), taps=[1]), Bad(wrong(RULE))
    made = fake_engine(RULE, right(RULE))
    judge, store = made.verifier, made.target.new_store(512)
    drafter = kind([good, bad])
    costs = made.plan.costs
    whole = Engine(
        made.target, store=store, verifier=judge, drafter=drafter, costs=costs, **options
    )
    return whole, good, bad


@pytest.mark.parametrize("kind", [Joined, Combined])
@pytest.mark.parametrize("static", [False, True])
def test_each_request_is_drafted_for_by_whom_it_wants(kind: Any, static: bool) -> None:
    made, good, bad = engine(kind, static=static)
    asked: dict[str, set[int]] = {"good": set(), "bad": set()}
    for drafter in (good, bad):
        script = drafter.script

        def noted(request: Any, budget: int, script: Any = script, name: str = drafter.name) -> Any:
            asked[name].add(request.id)
            return script(request, budget)

        drafter.script = noted
    wants: list[dict[str, Any]] = [{}, {"draft": "good"}, {"draft": "bad"}, {"draft": "none"}]
    jobs = [(PROMPT, greedy(24, speculation=want)) for want in wants]
    plain = run(fake_engine(RULE), [(PROMPT, greedy(24))])
    assert run(made, jobs) == plain * 4
    assert {1} <= asked["good"] <= {0, 1}
    assert {2} <= asked["bad"] <= {0, 2}


def test_who_wants_a_good_draft_is_faster_and_sees_who_proposed() -> None:
    made, *_ = engine(static=True)
    (stream,) = made.add(PROMPT, greedy(24, speculation={"draft": "good"}))
    sources: list[str] = []
    while made.busy:
        for delta in made.step():
            sources += delta.sources
    assert stream.stats.tokens_per_pass > 3
    assert set(sources) == {"good", ""}


def test_the_only_drafter_may_be_named() -> None:
    made = fake_engine(RULE, right(RULE))
    (stream,) = made.add(PROMPT, greedy(24, speculation={"draft": "script"}))
    while made.busy:
        made.step()
    assert stream.stats.tokens_per_pass > 3


@pytest.mark.parametrize("loaded", [True, False])
def test_a_draft_that_was_not_loaded_is_refused(loaded: bool) -> None:
    made = engine()[0] if loaded else fake_engine(RULE)
    with pytest.raises(ConfigError, match="no draft 'goood' was loaded; ") as refused:
        made.add(PROMPT, greedy(4, speculation={"draft": "goood"}))
    assert ("did you mean 'good'?" if loaded else "none") in str(refused.value)
    assert not made.busy
    made.add(PROMPT, greedy(4, speculation={"draft": "none"}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_real_drafters_change_no_text(tmp_path: Path, temperature: float) -> None:
    model = tiny_llama(tmp_path / "model", layers=3)
    llm = LLM(model, draft="ngram+suffix+skip:1")
    values = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True, "seed": 5}
    wants = ["none", "ngram", "suffix", "skip", None]
    params = [SamplingParams(**values, speculation={"draft": want}) for want in wants]
    texts = [output.outputs[0].token_ids for output in llm.generate(["abab abab"] * 5, params)]
    assert texts == [texts[0]] * 5
    assert llm.engine.store.free_slots == llm.engine.store.slots
