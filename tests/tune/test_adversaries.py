"""The drafter that is never right and the text without patterns."""

from __future__ import annotations

from drafting import check, request
from forerun.engine.llm import LLM
from forerun.tune.adversaries import SURE, AlwaysWrong, random_text
from forerun.tune.workloads import Workload

VOCAB = 50_000


def test_its_chains_are_random_and_it_is_sure_of_them() -> None:
    drafter = AlwaysWrong(VOCAB)
    (first,) = drafter.propose([request([1, 2, 3])], [8])
    (second,) = drafter.propose([request([1, 2, 3])], [8])
    check(first)
    assert first.is_chain
    assert len(first) == 8
    assert first.survival[0] == SURE
    assert set(first.tokens) != set(second.tokens)
    assert max(first.tokens) < VOCAB
    (last,) = drafter.propose([request([1, 2, 3], max_tokens=2)], [8])
    assert len(last) == 1  # the pass brings the other token


def test_random_text_is_the_same_every_time_and_has_no_patterns() -> None:
    workload = random_text("random")
    assert isinstance(workload, Workload)
    assert workload.hash == random_text("random").hash
    words = " ".join(prompt.messages[0]["content"] for prompt in workload.prompts).split()
    assert len({word for word in words if len(word) > 3}) > 80


def test_a_model_runs_with_a_drafter_of_ones_own(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from forerun.core import SamplingParams
    from tiny import tiny_llama

    model = tiny_llama(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, drafted = LLM(model), LLM(model, draft=AlwaysWrong(model.target.info.vocab_size))
    tokens = [llm.generate("Hello", params)[0].outputs[0].token_ids for llm in (plain, drafted)]
    assert tokens[0] == tokens[1]
    assert drafted.stats.asked > 0
