"""Offline use: prompts in, texts out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes import FREE, FakeTarget, random_rule, script_rule
from forerun import LLM, SamplingParams
from forerun.engine import llm as module
from forerun.engine.llm import new_store
from forerun.engine.plan import Plan
from forerun.errors import CapacityError, ConfigError, PromptError
from forerun.models.hub import LoadedModel
from forerun.models.tokenizer import Tokenizer
from tiny import END, VOCAB, tiny_folder, tiny_llama, tiny_tokenizer

TEXT = "naïve 日本, two, three"


def scripted(**options: object) -> LLM:
    """Says TEXT behind any prompt of one byte."""
    target = FakeTarget(script_rule(1, list(TEXT.encode())))
    model = LoadedModel("fake", target, Tokenizer(tiny_tokenizer()), frozenset([END]))
    return LLM(model, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=3)


def test_one_text_in_one_text_out() -> None:
    (output,) = scripted().generate("?", SamplingParams(max_tokens=100, temperature=0))
    (completion,) = output.outputs
    assert completion.text == TEXT
    assert completion.token_ids == [*TEXT.encode(), END]
    assert completion.sources == [""] * len(completion.token_ids)
    assert (completion.finish_reason, completion.logprobs) == ("stop", None)
    assert (output.prompt, output.prompt_token_ids) == ("?", [ord("?")])
    assert 0 < output.ttft_s <= output.seconds
    assert output.stats.emitted_tokens == len(completion.token_ids)


def test_prompts_may_be_token_ids() -> None:
    params = SamplingParams(max_tokens=100, temperature=0)
    for prompts in ([65], [[65]]):
        (output,) = scripted().generate(prompts, params)
        assert (output.prompt, output.outputs[0].text) == (None, TEXT)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_prompts_may_be_arrays(kind: Callable[[list[int]], Any]) -> None:
    params = SamplingParams(max_tokens=100, temperature=0)
    for prompts in (kind([65]), [kind([65])], kind([[65]])):
        (output,) = scripted().generate(prompts, params)
        assert (output.prompt_token_ids, output.outputs[0].text) == ([65], TEXT)


@pytest.mark.parametrize(
    "prompts", [5, None, [1.5], [[1.5]], [None], {"prompt": "a"}, [{"prompt": "a"}], ["a", [["b"]]]]
)
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    llm = scripted()
    with pytest.raises(PromptError, match="is no prompt; give a text or a list of token ids"):
        llm.generate(prompts)
    assert not llm.engine.busy


def test_outputs_keep_the_order_of_the_prompts(model: LoadedModel) -> None:
    llm = LLM(model, draft="ngram", max_num_seqs=2)
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (30, 2, 9, 5)]
    prompts = ["a b a b", "c", "d e f", "g"]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 2, 9, 5]
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        (alone,) = LLM(model).generate(prompt, each)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text


def test_finished_outputs_come_first_and_survive_an_interruption(model: LoadedModel) -> None:
    llm = LLM(model)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (40, 3, 10)]
    finished = llm.generate_iter(["a", "b", "c"], params)
    assert [next(finished).prompt, next(finished).prompt] == ["b", "c"]

    def interrupted() -> None:
        raise KeyboardInterrupt

    llm.engine.target, target = (
        type("Broken", (), {"forward": lambda *_: interrupted()})(),
        model.target,
    )
    with pytest.raises(KeyboardInterrupt):
        next(finished)
    llm.engine.target = target
    assert not llm.engine.busy, "the rest was aborted"
    assert llm.engine.store.free_slots == llm.engine.store.slots
    (again,) = llm.generate("a", params[0])
    assert len(again.outputs[0].token_ids) == 40


def test_several_outputs_of_one_prompt(model: LoadedModel) -> None:
    (output,) = LLM(model).generate("a", SamplingParams(n=3, max_tokens=8, seed=1, logprobs=0))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({completion.text for completion in output.outputs}) == 3
    for completion in output.outputs:
        params = SamplingParams(max_tokens=8, seed=completion.seed, logprobs=0)
        (alone,) = LLM(model).generate("a", params)
        assert alone.outputs[0].token_ids == completion.token_ids
        assert completion.logprobs is not None
        for mine, other in zip(completion.logprobs, alone.outputs[0].logprobs, strict=True):
            assert mine.chosen == pytest.approx(other.chosen, abs=1e-4)


def test_who_waits_for_several_texts_is_known(model: LoadedModel) -> None:
    llm = LLM(model)
    added: list[int | None] = []
    add = llm.engine.add

    def note(*args: Any) -> Any:
        generations = add(*args)
        added.extend(generation.request.call for generation in generations)
        return generations

    llm.engine.add = note
    llm.generate(["one", "two"], [SamplingParams(max_tokens=2, n=n) for n in (1, 2)])
    llm.generate("three", SamplingParams(max_tokens=2))
    list(llm.stream("four", SamplingParams(max_tokens=2)))
    first, second, third, fourth, fifth = added
    assert first == second == third
    assert len({first, fourth, fifth}) == 3


def test_a_stream_brings_the_text_in_whole_characters() -> None:
    deltas = list(scripted().stream("?", SamplingParams(max_tokens=100, temperature=0)))
    assert "".join(delta.text for delta in deltas) == TEXT
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert deltas[-1].finish_reason == "stop"


def test_a_stream_checks_when_it_is_asked_for() -> None:
    llm = scripted()
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.stream("")
    with pytest.raises(PromptError, match=r"\['a', 'b'\] is no prompt"):
        llm.stream(["a", "b"])
    with pytest.raises(ConfigError, match="is no SamplingParams"):
        llm.stream("a", {"temperature": 0})
    llm.stream("a")
    assert not llm.engine.busy, "nobody reads it"


def test_streams_and_lists_may_run_at_once(model: LoadedModel) -> None:
    llm = LLM(model, draft="suffix")
    params = SamplingParams(max_tokens=25, seed=4, ignore_eos=True)
    first, second = llm.stream("ab ab", params), llm.stream("cd cd", params)
    texts = ["", ""]
    for _ in range(3):
        texts[0] += next(first).text
        texts[1] += next(second).text
    (whole,) = llm.generate("ab ab", params)
    texts[0] += "".join(delta.text for delta in first)
    texts[1] += "".join(delta.text for delta in second)
    assert texts[0] == whole.outputs[0].text
    assert texts[1] == LLM(model).generate("cd cd", params)[0].outputs[0].text


def test_a_closed_stream_is_aborted(model: LoadedModel) -> None:
    llm = LLM(model)
    stream = llm.stream("ab", SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert not llm.engine.busy


def test_chat_goes_through_the_template(model: LoadedModel) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=5, temperature=0)
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, params)
    text = "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert one.prompt_token_ids == llm.tokenizer.encode(text, special=False)
    both = llm.chat([conversation, conversation], params)
    assert [each.outputs[0].token_ids for each in both] == [one.outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    "messages", [[], [[]], {"role": "user"}, "hi", ["hi"], [[{"role": "user"}], []]]
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError, match="a list of at least one message"):
        scripted().chat(messages)


def test_nothing_runs_if_one_prompt_cannot_be_served(model: LoadedModel) -> None:
    llm = LLM(model)
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.generate(["fine", "", "fine"])
    with pytest.raises(PromptError, match="512"):
        llm.generate(["fine", "long" * 200])
    assert not llm.engine.busy
    with pytest.raises(ConfigError, match="2 prompts came with 3 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    for wrong in ({}, {"temperature": 0}, [{"temperature": 0}]):
        with pytest.raises(ConfigError, match="is no SamplingParams; write SamplingParams"):
            llm.generate(["a"], wrong)


def test_no_prompts_no_outputs(model: LoadedModel) -> None:
    assert LLM(model).generate([]) == []


def test_the_verifier_says_how_drafts_are_drawn(model: LoadedModel, tmp_path: Path) -> None:
    """Drafts under `rejection` keep the law they were drawn from."""
    folder = tiny_folder(tmp_path / "draft", layers=1, seed=3)
    llm = LLM(model, draft=f"model:{folder}", verifier="rejection", dtype="float32")
    llm.engine.plan = Plan(FREE)
    laws = []
    judge = llm.engine.verifier.judge

    def spy(requests, drafts, logits_NV):  # type: ignore[no-untyped-def]
        laws.extend(draft.probs_NV for draft in drafts if draft)
        return judge(requests, drafts, logits_NV)

    llm.engine.verifier.judge = spy  # type: ignore[method-assign]
    llm.generate("ab ab", SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    assert laws
    assert all(law is not None and law.shape[1] == VOCAB for law in laws)


def test_static_drafts_are_checked_whole(tmp_path: Path) -> None:
    """The layers skipped here guess badly: the plan gives them up, unless it is told not to."""
    model = tiny_llama(tmp_path, layers=3)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    found = {}
    for static in (False, True):
        llm = LLM(model, draft="skip:1,k=3,min_prob=0", static=static)
        (output,) = llm.generate([[7, 8, 9]], params)
        found[static] = output.outputs[0].token_ids, llm.stats
    (planned_ids, planned), (static_ids, static_stats) = found[False], found[True]
    assert planned_ids == static_ids
    assert static_stats.drafts >= static_stats.passes - 2  # the prompt's pass and the last token's
    assert static_stats.draft_tokens > 2.9 * static_stats.drafts - 6
    assert planned.draft_tokens < static_stats.draft_tokens


def test_no_draft_is_none_and_an_empty_one_is_refused() -> None:
    for draft in (None, "none"):
        assert scripted(draft=draft).engine.drafter is None
    with pytest.raises(ConfigError, match="draft spec '' lacks a drafter"):
        scripted(draft="")


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", layers=1, seed=3)
    assert LLM(folder, kv_tokens=64).model.name == str(folder)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_rows", "kv_tokens"])
def test_counts_are_whole_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '5'; give a whole number"):
        scripted(**{name: "5"})


def test_unknown_names_are_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        LLM(model, draft="sufix")
    with pytest.raises(ConfigError, match="did you mean 'follow'"):
        LLM(model, verifier="folow")
    with pytest.raises(ConfigError, match="max_batch_rows 8 cannot hold"):
        LLM(model, max_batch_rows=8)


def test_the_store_is_as_large_as_asked_or_as_is_sensible(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget(random_rule(), max_length=1000)
    slot = 8  # bytes: a key and a value of one float
    monkeypatch.setattr(module, "_free_memory", lambda _: 100_000 * slot)
    assert new_store(target, 3, None).slots == 3000
    assert new_store(target, 1, None).slots == 1000
    assert new_store(target, 1000, None).slots == 50_000, "at most half of what is free"
    assert new_store(target, 3, 70).slots == 70
    for wrong in (0, -1, 100_001):
        with pytest.raises(CapacityError, match="ask for 1 to 100000 with kv_tokens"):
            new_store(target, 3, wrong)


def test_free_memory_is_plausible(model: LoadedModel) -> None:
    assert 2**20 < module._free_memory(model.target.info.device) < 2**50


def test_importing_forerun_is_cheap() -> None:
    code = "import sys, forerun; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
