"""How figures are measured, compared and added up, with an engine that takes no time."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forerun.core import SamplingParams, StepStats
from forerun.engine.outputs import Completion, RequestOutput
from forerun.errors import ConfigError, PromptError
from forerun.tune import bench
from forerun.tune.bench import Bench, Setting, method
from forerun.tune.workloads import Prompt, Workload

GREEDY = SamplingParams(temperature=0, seed=3, max_tokens=4)


class Tokens:
    """A tokenizer whose ids are the characters."""

    has_chat_template = False

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


class Clock:
    """Time that passes only when an engine works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class FakeEngine:
    """Answers every prompt with its own tokens; drafts are two tokens, of which one is accepted.

    seconds: per call. wrong: prompts whose answer gets another token at its end.
    """

    def __init__(self, spec: str, log: list[tuple[Any, ...]], clock: Clock) -> None:
        self.spec, self.log, self.clock = spec, log, clock
        self.seconds = 2.0 if spec == "none" else 1.0
        self.wrong: set[tuple[int, ...]] = set()

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        warm_up = params[0].max_tokens == bench.WARM_UP_TOKENS
        seeds = [] if warm_up else [p.seed for p in params]
        self.log.append((self.spec, "warm-up" if warm_up else "run", len(prompts), seeds))
        self.clock.now += self.seconds
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: list[int]) -> RequestOutput:
        tokens = [*prompt[:3], 0 if tuple(prompt) in self.wrong else 1]
        stats = StepStats(draft_seconds=0.002, forward_seconds=0.02, step_seconds=0.03)
        stats.record(0, 0, 1)
        if self.spec == "none":
            for _ in tokens[1:]:
                stats.record(0, 0, 1)
        else:
            stats.record(2, 1, 2)
            stats.record(0, 0, 1)
        output = [Completion(0, token_ids=tokens)]
        return RequestOutput(0, None, prompt, output, stats, ttft_s=0.1, seconds=self.seconds)


class Lab:
    """A benchmark over fake engines; `engines` are those of the last session by spec."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.clock = Clock()
        self.engines: dict[str, FakeEngine] = {}
        self.wrong: set[tuple[int, ...]] = set()
        monkeypatch.setattr(bench, "time", self.clock)
        info = SimpleNamespace(max_length=50, dtype=torch.float32, device=torch.device("cpu"))
        model = SimpleNamespace(name="tiny", target=SimpleNamespace(info=info), tokenizer=Tokens())
        self.bench = Bench(cast(Any, model), setting, self.start)

    def start(self, spec: str, batch: int) -> FakeEngine:
        engine = self.engines[spec] = FakeEngine(spec, self.log, self.clock)
        if spec != "none":
            engine.wrong = self.wrong
        return engine


def workload(*texts: str, name: str = "words") -> Workload:
    prompts = [Prompt(str(i), ({"role": "user", "content": text},)) for i, text in enumerate(texts)]
    return Workload(name, tuple(prompts))


def setting(*texts: str, **options: Any) -> Setting:
    options.setdefault("specs", ["ngram"])
    return Setting([workload(*texts)], params=GREEDY, **options)


def test_specs_take_turns_and_the_order_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", "two", "six", specs=["ngram", "suffix"]))
    assert len(list(lab.bench.run())) == lab.bench.runs == 9
    runs = [entry[0] for entry in lab.log if entry[1] == "run"]
    assert runs[:3] == ["none", "ngram", "suffix"]
    assert runs[3:6] == ["ngram", "suffix", "none"]
    assert runs[6:] == ["suffix", "none", "ngram"]
    assert [entry[1] for entry in lab.log[:3]] == ["warm-up"] * 3  # before anything is measured


def test_plain_decoding_always_runs_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", specs=["ngram", "none", "ngram"]))
    assert lab.bench.specs == ["none", "ngram"]


def test_groups_keep_each_prompts_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", "two", "six", batches=[1, 2]))
    assert len(list(lab.bench.run())) == lab.bench.runs
    plain = [entry for entry in lab.log if entry[0] == "none" and entry[1] == "run"]
    assert [entry[3] for entry in plain] == [[3], [4], [5], [3, 4], [5]]


def test_figures_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", "two"))
    list(lab.bench.run())
    plain, drafted = lab.bench.rows()
    assert (plain.tok_s, plain.speedup, plain.tokens_per_pass) == (2.0, 1.0, 1.0)
    assert (plain.acceptance_length, plain.acceptance_per_position) == (1.0, [])
    assert (plain.identical, plain.prompts_compared) == (0, 0)  # nothing to compare it with
    assert (drafted.prompts, drafted.output_tokens, drafted.seconds) == (2, 8, 2.0)
    assert (drafted.tok_s, drafted.plain_tok_s, drafted.speedup) == (4.0, 2.0, 2.0)
    assert drafted.acceptance_length == 2.0  # one of two, and the token that follows
    assert drafted.acceptance_per_position == [1.0]
    assert drafted.tokens_per_pass == 4 / 3
    assert (drafted.identical, drafted.prompts_compared) == (2, 2)
    assert drafted.ttft_ms == 100.0
    assert drafted.tpot_ms == pytest.approx(300.0)  # (1 s - 0.1 s) / 3 tokens
    # two passes of each answer came after its prompt
    assert drafted.draft_ms == pytest.approx(1.0)
    assert drafted.verify_ms == pytest.approx(10.0)
    assert drafted.other_ms == pytest.approx(4.0)
    assert drafted.peak_rss_mb > 1
    assert drafted.step_ms["forward"] == drafted.verify_ms
    assert drafted.step_ms["plan"] == 0
    assert (drafted.rows_per_pass, drafted.plain_share) == (1 + 2 / 3, 1 - 1 / 3)
    # a pass takes 4 / 3 times as long as a plain one, and one in three had a draft
    assert drafted.break_even == pytest.approx(2.0)
    assert plain.break_even is None


def test_one_wrong_token_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", "two", "six"))
    lab.wrong.add(tuple(map(ord, "two")))
    list(lab.bench.run())
    drafted = lab.bench.rows()[1]
    assert (drafted.identical, drafted.prompts_compared) == (2, 3)


def test_repeated_plain_decoding_is_compared_with_its_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, setting("one", "two", repeat=3))
    list(lab.bench.run())
    plain, drafted = lab.bench.rows()
    assert (plain.prompts, plain.identical, plain.prompts_compared) == (6, 4, 4)
    assert (drafted.identical, drafted.prompts_compared) == (6, 6)


def test_rows_of_a_run_that_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, setting("one", "two", "six"))
    assert lab.bench.rows() == []
    run = lab.bench.run()
    for _ in range(3):  # both specs on the first prompt, one of them on the second
        next(run)
    assert [row.prompts for row in lab.bench.rows()] == [1, 1]


def test_row_has_the_agreed_fields() -> None:
    agreed = (
        "model, dtype, device, method, spec, workload, batch, temperature, prompts, output_tokens, "
        "seconds, tok_s, plain_tok_s, speedup, acceptance_length, tokens_per_pass, "
        "acceptance_per_position, draft_ms, verify_ms, other_ms, identical, prompts_compared, "
        "ttft_ms, tpot_ms, peak_rss_mb, step_ms, rows_per_pass, plain_share, break_even, "
        "calibration, calibration_error, cost_error"
    )
    assert [field.name for field in fields(bench.Row)] == agreed.split(", ")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("none", "none"), ("ngram:k=8+suffix", "ngram+suffix"), ('{"method": "ngram"}', "ngram")],
)
def test_method_is_the_spec_without_options(spec: str, expected: str) -> None:
    assert method(spec) == expected


def test_prompt_longer_than_the_context_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match="prompt 1 of words has 50 tokens"):
        Lab(monkeypatch, setting("one", "x" * 50))


def test_settings_that_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        setting("one", batches=[0])
    with pytest.raises(ConfigError, match="seed"):
        Setting([workload("one")], ["ngram"], params=SamplingParams())
    with pytest.raises(ConfigError, match="leave n at 1"):
        Setting([workload("one")], ["ngram"], params=SamplingParams(seed=0, n=2))
    with pytest.raises(ConfigError, match="one name"):
        Setting([workload("one"), workload("two")], ["ngram"])
