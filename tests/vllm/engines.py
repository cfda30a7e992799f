"""The same prompts and the same draft in forerun and in vLLM, round by round.

A round is a pass that checked a draft. Both engines write on behind the end of an answer, so that
every round that begins inside of it is seen whole: what a pass accepts behind the last token is
cut off otherwise, and the engines differ in whether they count it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.engines import ENGINES
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.engine.llm import LLM
from forerun.engine.scheduler import Took, Turn
from forerun.engine.static import Static
from forerun.models.hub import LoadedModel
from forerun.verify.base import Verifier

FAMILIES = ("medusa", "eagle3", "dflash")
K = 4  # most tokens per draft
MAX_TOKENS = 128
WRITTEN = MAX_TOKENS + K + 1  # so that the last round is whole, too
OPTIONS = {"medusa": ",top_k=1", "eagle3": ",min_prob=0", "dflash": ""}  # for whole chains

Tokens = Sequence[int]


@dataclass(frozen=True)
class Round:
    """begin: tokens of the answer before it. It brought the accepted ones and one more."""

    begin: int
    accepted: int


@dataclass(frozen=True)
class Answer:
    """All `WRITTEN` tokens, and all rounds. `end` is where the answer ends in earnest."""

    tokens: list[int]
    rounds: list[Round]
    end: int


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Mean over all rounds that begin inside of the answers, the target's own token included."""
    rounds = [each for answer in answers for each in answer.rounds if each.begin < answer.end]
    return 1 + sum(each.accepted for each in rounds) / len(rounds)


def _end(tokens: Tokens, stop_ids: frozenset[int]) -> int:
    """Behind the first stop token, and behind MAX_TOKENS at the latest."""
    places = (place + 1 for place, token in enumerate(tokens) if token in stop_ids)
    return min(next(places, MAX_TOKENS), MAX_TOKENS)


# ---- forerun ------------------------------------------------------------------------------------


class WholeChains(Static):
    """Has every round draft k tokens, whatever they cost, and writes down what became of them."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self.rounds: dict[int, list[Round]] = defaultdict(list)

    def budgets(self, turns: Sequence[Turn], rows_left: int, crowded: bool = False) -> list[int]:
        return [min(self._k, turn.request.remaining - 1) for turn in turns]

    def learn(self, asked: Sequence[Turn], took: Took) -> None:
        for turn in asked:
            assert turn.verdict
            accepted = len(turn.verdict.path)
            begin = turn.request.output_length - accepted - 1
            assert len(turn.draft) == self._k or begin >= MAX_TOKENS, "a draft is no whole chain"
            self.rounds[turn.request.id].append(Round(begin, accepted))


class Recite(Verifier):
    """Whatever the target thinks, the answer is a given text; chains are followed along it.

    By this a draft is judged on the very text that another engine wrote.
    """

    name = "recite"

    def __init__(self) -> None:
        self.texts: dict[int, Tokens] = {}  # by the ids of their requests

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        verdicts = []
        for request, draft in zip(requests, drafts, strict=True):
            rest = self.texts[request.id][request.output_length :]
            same = 0
            while same < len(draft) and draft.tokens[same] == rest[same]:
                same += 1
            verdicts.append(Verdict(range(same), rest[same]))
        return verdicts


def plain_texts(model: LoadedModel, prompts: Sequence[Tokens]) -> list[list[int]]:
    """What forerun writes without a draft."""
    outputs = LLM(model).generate(list(prompts), _params())
    return [output.outputs[0].token_ids for output in outputs]


def forerun_answers(
    model: LoadedModel,
    family: str,
    draft: Path,
    prompts: Sequence[Tokens],
    k: int,
    texts: Sequence[Tokens] | None = None,
    tap_shift: int = 0,
) -> list[Answer]:
    """k: tokens per draft. texts: what to write; None: what the target does.

    tap_shift: how many layers higher than trained the draft reads the target, which spoils it.
    """
    llm = LLM(model, draft=f"{family}:{draft},k={k}{OPTIONS[family]}")
    engine, plan, recite = llm.engine, WholeChains(k), Recite()
    engine.plan = plan
    assert engine.drafter
    engine.drafter.taps = [boundary + tap_shift for boundary in engine.drafter.taps]
    streams = [stream for ids in prompts for stream in engine.add(ids, _params())]
    if texts is not None:
        engine.verifier = recite
        recite.texts = {each.request.id: t for each, t in zip(streams, texts, strict=True)}
    while engine.busy:
        engine.step()
    return [
        Answer(
            stream.request.output,
            plan.rounds[stream.request.id],
            _end(stream.request.output, model.stop_ids),
        )
        for stream in streams
    ]


def _params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True)


# ---- vLLM ---------------------------------------------------------------------------------------


def vllm_answers(
    target: Path,
    prompts: Sequence[Tokens],
    stop_ids: frozenset[int],
    scratch: Path,
    line: str | None = None,
) -> list[Answer]:
    """line: the command line with the options of a draft, as `forerun export` prints it; its drafts
    are cut to K tokens. None decodes plainly. Raises `CalledProcessError` where vLLM cannot run it.
    """
    job = {
        "options": {"model": str(target), **(_options(line) if line else {})},
        "prompts": prompts,
        "max_tokens": WRITTEN,
    }
    asked, answered = scratch / "job.json", scratch / "answers.json"
    asked.write_text(json.dumps(job), encoding="utf-8")
    vllm = ENGINES["vllm"]
    worker = Path(__file__).with_name("worker.py")
    command = [str(vllm.python), str(worker), str(asked), str(answered)]
    subprocess.run(command, env=vllm.variables(), check=True)
    report = json.loads(answered.read_text(encoding="utf-8"))
    answers = [
        Answer(tokens, _rounds(counts), _end(tokens, stop_ids))
        for tokens, counts in zip(report["outputs"], report["counts"], strict=True)
    ]
    if line:
        _check_counters(answers, report["metrics"], ahead(line))
    return answers


def _options(line: str) -> dict[str, Any]:
    """What a `vllm serve MODEL --option JSON ...` sets, as vLLM's Python interface takes it."""
    _, _, _, *words = shlex.split(line)
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    options = dict(zip(names, map(json.loads, words[1::2]), strict=True))
    speculative = options["speculative_config"]
    speculative["num_speculative_tokens"] = min(K, speculative["num_speculative_tokens"])
    return options


def ahead(line: str) -> int:
    """Tokens per draft that vLLM is told to propose."""
    tokens: int = _options(line)["speculative_config"]["num_speculative_tokens"]
    return tokens


def _rounds(counts: Sequence[int]) -> list[Round]:
    """From the tokens that each step brought; the first step is the prompt's."""
    begin, rounds = counts[0], []
    for count in counts[1:]:
        rounds.append(Round(begin, count - 1))
        begin += count
    return rounds


def _check_counters(answers: Sequence[Answer], metrics: dict[str, Any], k: int) -> None:
    """vLLM's own counters tell of the same rounds, and in the last round of each answer perhaps of
    accepted tokens that were cut off."""
    stem = "vllm:spec_decode_num_"
    rounds = [each for answer in answers for each in answer.rounds]
    assert metrics[f"{stem}drafts"] == len(rounds), "vLLM counts other rounds"
    assert metrics[f"{stem}draft_tokens"] == k * len(rounds), "vLLM cut drafts"
    cut = metrics[f"{stem}accepted_tokens"] - sum(each.accepted for each in rounds)
    assert 0 <= cut <= K * len(answers), "vLLM counts other accepted tokens"
