"""Prompts that a model writes itself: where it begins, where it stops, and going on."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

import tiny
from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.errors import PromptError
from forerun.models.tokenizer import Tokenizer
from forerun.train.filters import Seen
from forerun.train.writing import Writer

# the likelier end makes a random model write turns that end
PARAMS = SamplingParams(top_p=0.95, max_tokens=24, logit_bias={tiny.END: 4.0})
SYSTEMS = ["Be kind.", "Be brief."]
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny.tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1))


def asked_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SamplingParams]]:
    """What the engine is asked from now on."""
    asked = []
    add = llm.engine.add

    def watched(tokens, params):  # type: ignore[no-untyped-def]
        asked.append((llm.tokenizer.decode(tokens, skip_special_tokens=False), params))
        return add(tokens, params)

    monkeypatch.setattr(llm.engine, "add", watched)
    return asked


def written(writer: Writer, count: int, first: int = 0) -> list[tuple[int, list[dict[str, str]]]]:
    return list(islice(writer.write(Seen(), first, Counter()), count))


def test_the_model_goes_on_where_the_user_begins(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(llm, monkeypatch)
    written(Writer(llm, PARAMS, SYSTEMS, batch=3), 3)
    for place, (text, params) in enumerate(asked):
        system = SYSTEMS[place % 2]
        assert text == f"<|start|>system\n{system}<|end|><|start|>user\n"
        assert params.stop_token_ids == (tiny.END,)
    assert len({params.seed for _, params in asked}) == len(asked)
    assert not llm.engine.busy, "what ran ahead is aborted"


def test_a_template_without_control_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "tokenizer", Tokenizer(llm.tokenizer.backend, NO_END))
    asked = asked_of(llm, monkeypatch)
    written(Writer(llm, PARAMS), 1)
    assert (asked[0][0], asked[0][1].stop) == ("user: ", ("\n\n",))


def test_templates_that_mark_no_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "tokenizer", Tokenizer(llm.tokenizer.backend))
    with pytest.raises(PromptError, match="no chat template"):
        Writer(llm, PARAMS)
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(llm, "tokenizer", Tokenizer(llm.tokenizer.backend, bare))
    with pytest.raises(PromptError, match="does not mark a user's turn"):
        Writer(llm, PARAMS)


def test_the_same_prompts_whatever_runs_together(llm: LLM) -> None:
    """And from any attempt on."""
    together = written(Writer(llm, PARAMS, SYSTEMS, batch=8), 12)
    assert written(Writer(llm, PARAMS, SYSTEMS, batch=1), 12) == together
    first = together[4][0] + 1
    assert written(Writer(llm, PARAMS, SYSTEMS, batch=5), 7, first) == together[5:]
    assert written(Writer(llm, PARAMS, SYSTEMS, batch=8, seed=1), 12) != together


def test_the_system_turn_is_kept_on_demand(llm: LLM) -> None:
    for _, messages in written(Writer(llm, PARAMS, SYSTEMS), 4):
        assert [message["role"] for message in messages] == ["user"]
        assert messages[0]["content"].strip()
    for number, messages in written(Writer(llm, PARAMS, SYSTEMS, keep_system=True), 4):
        assert [message["role"] for message in messages] == ["system", "user"]
        assert messages[0]["content"] == SYSTEMS[number % 2]


def test_what_was_dropped_is_counted(llm: LLM) -> None:
    dropped: Counter[str] = Counter()
    found = list(islice(Writer(llm, PARAMS).write(Seen(), 0, dropped), 4))
    assert dropped["too long"] > 0
    assert dropped.total() == found[-1][0] + 1 - len(found)
    seen = Seen()
    for _, messages in found:
        seen.add(messages[0]["content"])
    again, dropped = next(Writer(llm, PARAMS).write(seen, 0, dropped)), Counter(dropped)
    assert again[0] > found[-1][0]
    assert dropped["duplicate"] == 4
