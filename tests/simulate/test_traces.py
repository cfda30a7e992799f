"""Traces: made up, written, read again, and recorded from an engine that decodes plainly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fakes import fake_engine, greedy, random_rule, run, wild
from forerun.core import Request
from forerun.drafters.tree import path
from forerun.errors import ConfigError
from forerun.simulate import traces
from forerun.simulate.record import Recorder
from forerun.simulate.traces import LENGTH, RIGHT, WRONG, Source, Step, Text, made_up

SOURCE = Source(model="m", draft="ngram", workloads=("chat", "code"), temperature=0.0)
TREE = Step(parents=(-1, 0, 0, -1), survival=(0.5, 0.25, 0.125, 0.25), accepted=(0, 2))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    texts = [Text(prompt_tokens=7, steps=(TREE, Step()))]
    traces.write(tmp_path / "t.jsonl", SOURCE, texts)
    found = traces.read(tmp_path / "t.jsonl")
    assert found.texts == texts
    assert found.title == "ngram on chat, code (m)"


def test_tokens_of_a_replayed_draft_say_what_is_right() -> None:
    draft = TREE.draft()
    assert draft.tokens == [RIGHT, WRONG, RIGHT, WRONG]
    assert (draft.parents, draft.survival) == (TREE.parents, TREE.survival)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"parents": [-1], "survival": []}, "every node needs"),
        ({"parents": [-1, 2, 0], "survival": [1, 1, 1]}, "parents stand before"),
        ({"parents": [-1, 0], "survival": [1, 1], "accepted": [1]}, "accepted nodes are a path"),
        ({"parents": [-1], "survival": [1], "accepted": [3]}, "accepted nodes are a path"),
        ({"parent": []}, "did you mean 'parents'?"),
    ],
)
def test_drafts_that_cannot_be(tmp_path: Path, step: dict[str, Any], message: str) -> None:
    file = tmp_path / "t.jsonl"
    line = json.dumps({"prompt_tokens": 1, "steps": [step]})
    file.write_text(f"{SOURCE.model_dump_json()}\n{line}\n")
    with pytest.raises(ConfigError) as error:
        traces.read(file)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "one\n", "[]\n", "{}\n", SOURCE.model_dump_json() + "\n"])
def test_files_that_are_no_traces(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError):
        traces.read(file)


def test_made_up_drafts_are_right_as_often_as_is_said() -> None:
    trace = made_up([0.5, 1.0, 0.0], claims=[0.5, 0.5, 0.5])
    steps = [step for text in trace.texts for step in text.steps]
    assert {len(text.steps) for text in trace.texts} == {LENGTH - 1}
    counts = Counter(step.accepted for step in steps)
    assert set(counts) == {(), (0, 1)}
    assert counts[()] / len(steps) == pytest.approx(0.5, abs=0.02)
    assert steps[0].survival == (0.5, 0.25, 0.125)
    assert steps[0].parents == (-1, 0, 1)


def test_a_recorder_decodes_plainly_and_knows_what_was_right() -> None:
    """Every step has the script's draft at that place, and of it the path that the text takes."""
    rule = random_rule()
    script = wild(rule)
    engine = fake_engine(rule, script)
    recorder = engine.plan = Recorder()
    (output,) = run(engine, [([1, 2, 3], greedy(20))])
    assert engine.stats.passes == 20, "plain: one token a pass"
    (text,) = recorder.texts
    assert (text.prompt_tokens, len(text.steps)) == (3, 19)
    tokens = [1, 2, 3, *output]
    accepted = 0
    for place, step in enumerate(text.steps, start=4):
        request = Request(0, tokens[:place], 3, greedy(20), seed=0)
        draft = script(request, request.remaining - 1)
        spelled = [
            [draft.tokens[n] for n in path(draft.parents, node)] for node in range(len(draft))
        ]
        right = [text for text in spelled if text == tokens[place : place + len(text)]]
        assert step.parents == tuple(draft.parents)
        assert [draft.tokens[node] for node in step.accepted] == max(right, key=len, default=[])
        accepted += len(step.accepted)
    assert accepted > 5
