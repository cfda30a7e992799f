from __future__ import annotations

from typing import Any

import pytest

from forerun.config import Settings
from forerun.core import PHASES, Draft, Request, SamplingParams, StepStats
from forerun.errors import ConfigError

# ---- SamplingParams -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 0.5}, "SamplingParams has no 'temprature'; did you mean 'temperature'?"),
        ({"topp": 0.5}, "SamplingParams has no 'topp'; did you mean 'top_p'?"),
        ({"xyzzy": 1}, "SamplingParams has no 'xyzzy'; choose one of: frequency_penalty, "),
        ({"temperature": -1}, "SamplingParams: temperature: should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature: should be a finite number (got nan)"),
        ({"top_p": 0}, "top_p: should be greater than 0 (got 0)"),
        ({"top_p": 1.5}, "top_p: should be less than or equal to 1 (got 1.5)"),
        ({"top_k": -2}, "top_k: should be greater than or equal to -1"),
        ({"min_p": 2}, "min_p: should be less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: should be greater than 0"),
        ({"presence_penalty": 3}, "presence_penalty: should be less than or equal to 2"),
        ({"frequency_penalty": "much"}, "frequency_penalty: should be a valid number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias.a"),
        ({"max_tokens": 0}, "max_tokens: should be greater than or equal to 1 (got 0)"),
        ({"n": 0}, "n: should be greater than or equal to 1"),
        ({"logprobs": 21}, "logprobs: should be less than or equal to 20"),
        ({"stop": ["a", ""]}, "stop: a stop string must not be empty"),
        ({"speculation": {"enable": 1}}, "speculation has no 'enable'; did you mean 'enabled'?"),
        ({"speculation": {"max_draft_tokens": 0}}, "max_draft_tokens: should be greater than or"),
        ({"speculation": "off"}, "speculation"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**params)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_of_the_whole_names_no_values() -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(max_tokens=4, min_tokens=5)
    assert str(error.value) == "SamplingParams: min_tokens 5 is above max_tokens 4"


def test_settings_may_have_a_title() -> None:
    class Options(Settings):
        title = "ngram"
        k: int = 1

    with pytest.raises(ConfigError, match=r"^ngram: k: should be a valid integer"):
        Options(k="x")
    with pytest.raises(ConfigError, match=r"^ngram has no 'kk'; did you mean 'k'"):
        Options(kk=1)


def test_stop_may_be_one_string_many_or_none() -> None:
    given: list[Any] = ["end", ["a", "b"], None, ()]
    stops = [SamplingParams(stop=stop).stop for stop in given]
    assert stops == [("end",), ("a", "b"), (), ()]


def test_parameters_cannot_be_changed_afterwards() -> None:
    params = SamplingParams()
    with pytest.raises(ConfigError, match=r"changed; .* model_copy\(update=.'temperature'"):
        params.temperature = 0.5
    assert params.model_copy(update={"temperature": 0.5}).temperature == 0.5
    assert params.temperature == 1


def test_equal_parameters_have_one_hash() -> None:
    one = SamplingParams(stop=["a"], logit_bias={1: 2.0, 3: 4.0})
    same = SamplingParams(stop=["a"], logit_bias={3: 4.0, 1: 2.0})
    assert len({one, same, SamplingParams()}) == 2


def test_greedy_and_edits() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams(temperature=0.5, top_k=3, min_tokens=2).edits_logits
    for edit in (
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
    ):
        assert SamplingParams(**edit).edits_logits, edit


# ---- Request and Draft --------------------------------------------------------------------------


def test_lengths_of_a_request_agree() -> None:
    request = Request(0, [1, 2, 3, 4, 5], 3, SamplingParams(max_tokens=7), seed=0)
    assert request.output == [4, 5]
    assert request.output_length == 2
    assert request.remaining == 5
    assert request.cached == 0


@pytest.mark.parametrize("prompt_length", [0, 3])
def test_a_request_needs_its_whole_prompt(prompt_length: int) -> None:
    with pytest.raises(AssertionError):
        Request(0, [1, 2], prompt_length, SamplingParams(), seed=0)


@pytest.mark.parametrize(
    ("parents", "is_chain"),
    [
        ([], True),
        ([-1], True),
        ([-1, 0, 1], True),
        ([-1, -1], False),
        ([-1, 0, 0], False),
        ([-1, 0, -1], False),
    ],
)
def test_a_chain_is_a_thin_tree(parents: list[int], is_chain: bool) -> None:
    draft = Draft([7] * len(parents), parents, [1.0] * len(parents))
    assert draft.is_chain is is_chain
    assert len(draft) == len(parents)


# ---- StepStats ----------------------------------------------------------------------------------


def recorded(*steps: tuple[int, int, int]) -> StepStats:
    stats = StepStats()
    for drafted, accepted, emitted in steps:
        stats.record(drafted, accepted, emitted)
    return stats


def test_statistics_count_as_defined() -> None:
    stats = recorded((4, 2, 3), (0, 0, 1), (4, 0, 1), (2, 2, 3))
    assert stats.passes == 4
    assert stats.drafts == 3  # the plain pass is none
    assert stats.draft_tokens == 10
    assert stats.accepted_tokens == 4
    assert stats.emitted_tokens == 8
    assert stats.accepted_at == [2, 2]
    assert stats.acceptance_length == 1 + 4 / 3
    assert stats.acceptance_rate == 4 / 10
    assert stats.tokens_per_pass == 8 / 4
    assert stats.acceptance_per_position == [2 / 3, 2 / 3]


def test_statistics_of_nothing() -> None:
    stats = StepStats()
    assert stats.acceptance_length == 1
    assert stats.acceptance_rate == 0
    assert stats.tokens_per_pass == 0
    assert stats.acceptance_per_position == []


def test_adding_statistics_is_recording_both() -> None:
    one, other = [(4, 1, 2), (0, 0, 1)], [(4, 3, 4), (3, 2, 3)]
    total = recorded(*one)
    total.add(recorded(*other))
    assert total == recorded(*one, *other)
    total = recorded(*other)
    total.add(recorded(*one))
    assert total == recorded(*one, *other)
    timed = StepStats(draft_seconds=1, forward_seconds=2, step_seconds=4)
    timed.add(StepStats(draft_seconds=0.5, forward_seconds=0.25, step_seconds=1))
    assert (timed.draft_seconds, timed.forward_seconds, timed.step_seconds) == (1.5, 2.25, 5)


def test_calibration_is_counted_by_tenths_of_survival() -> None:
    stats, other = StepStats(), StepStats()
    stats.compare([0.95, 0.35, 0.3], path=[0, 2])
    other.compare([1.0], path=[])
    stats.add(other)
    assert stats.verified_in == [0, 0, 0, 2, 0, 0, 0, 0, 0, 2]
    assert stats.expected_in[3] == pytest.approx(0.65)
    assert stats.accepted_in == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert stats.calibration_error == pytest.approx((0.35 + 0.95) / 4)
    assert StepStats().calibration_error == StepStats().cost_error == 0


def test_seconds_are_added_by_phase() -> None:
    stats = StepStats()
    stats.spend(0.5, dict.fromkeys(PHASES, 2.0) | {"draft": 4.0}, 20.0, 10.0, 1.0)
    stats.add(stats)
    assert (stats.draft_seconds, stats.forward_seconds, stats.step_seconds) == (4.0, 2.0, 20.0)
    assert stats.cost_error == pytest.approx(0.1)
