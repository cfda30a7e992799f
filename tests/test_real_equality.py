"""The real model, bit for bit: whatever the drafter, the sampling, the batch and the dtype, the
tokens are those of plain decoding, which is a loop of a few lines here.

The default run takes a corner of this grid, FORERUN_SLOW_TESTS=1 all of it (ten minutes).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from conftest import REAL_MODEL
from fakes import FREE
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.drafters import DRAFTERS, DraftContext, make_drafter
from forerun.drafters.spec import parse
from forerun.engine.costs import Costs
from forerun.engine.engine import Engine
from forerun.models import kernels
from forerun.models.hub import LoadedModel, load
from forerun.models.target import Segment
from forerun.sampling import Place, choose
from forerun.tune.workloads import load_workload
from forerun.verify import Verifier, make_verifier
from forerun.verify.follow import Follow

pytestmark = pytest.mark.real

ALL = bool(os.environ.get("FORERUN_SLOW_TESTS"))
SLOW = pytest.mark.skipif(not ALL, reason="takes ten minutes; set FORERUN_SLOW_TESTS=1")
PROMPTS = 10 if ALL else 5

ITSELF = f"model:{REAL_MODEL}"  # as its own draft model, with a cache of its own
SHARED = "suffix:shared=20"
SPECS = ["none", "ngram", "suffix", SHARED, ITSELF, "skip:10", "ngram:min=2,max=8+suffix"]

END, NEWLINE, COMMA = 2, 198, 28  # tokens
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "top_p": {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "ignore_eos": True,
    },
    # Some answers end early, as the end of the text is made likelier.
    "bias": {
        "temperature": 0.8,
        "logit_bias": {END: 12.0, NEWLINE: 1.0, COMMA: -2.0},
        "min_tokens": 8,
    },
}
DTYPES = ["bfloat16", "float32"]


@dataclass(frozen=True)
class Company:
    """How many sequences and rows share a pass, and the costs that its plan goes by."""

    sequences: int
    rows: int
    costs: Costs


COMPANIES = {
    # Nodes are pruned, and drafts that do not pay pause. The costs are so high that the time to
    # draft is nothing beside them: every run makes the same plans.
    "alone": Company(1, 512, Costs({1: 8.0, 8: 9.0, 32: 25.0})),
    # Every node is checked, and prompts come in chunks beside the drafts of others.
    "five": Company(5, 128, FREE),
}

CORNER = set(itertools.product(["ngram", "suffix"], ["greedy", "top_p"], ["five"], DTYPES[:1]))
GRID = [
    pytest.param(*cell, marks=() if cell in CORNER else SLOW)
    for cell in itertools.product(SPECS, SAMPLINGS, COMPANIES, DTYPES)
]
EACH_DTYPE = ["bfloat16", pytest.param("float32", marks=SLOW)]

Jobs: TypeAlias = list[tuple[list[int], SamplingParams]]
Load: TypeAlias = Callable[[str], LoadedModel]
Plain: TypeAlias = Callable[[str, str], list[list[int]]]


@pytest.fixture(scope="module")
def model() -> Load:
    """Loads each dtype once."""
    return cache(lambda dtype: load(REAL_MODEL, dtype, "cpu"))


@pytest.fixture(scope="module")
def plain(model: Load) -> Plain:
    """Plain decoding, once per sampling and dtype."""

    def decode_all(sampling: str, dtype: str) -> list[list[int]]:
        loaded = model(dtype)
        return [decode_plainly(loaded, *job) for job in jobs_for(loaded, sampling)]

    return cache(decode_all)


def jobs_for(loaded: LoadedModel, sampling: str) -> Jobs:
    """Prompts of 54 to 458 tokens and answers of 24 to 40, every one with a seed of its own."""
    prompts = load_workload("mix").first(PROMPTS).prompts
    return [
        (
            prompt.encode(loaded.tokenizer),
            SamplingParams(seed=i, max_tokens=24 + 4 * (i % 5), **SAMPLINGS[sampling]),
        )
        for i, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def decode_plainly(loaded: LoadedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """One sequence, one token a pass."""
    target, seed = loaded.target, params.seed
    assert seed is not None
    store = target.new_store(len(prompt) + params.max_tokens)
    span = store.open()
    stop_ids = frozenset() if params.ignore_eos else loaded.stop_ids
    request = Request(0, list(prompt), len(prompt), params, seed, stop_ids, span)
    while request.remaining and not stop_ids.intersection(request.output):
        rows = request.tokens[request.cached :]
        store.reserve(span, len(rows))
        result = target.forward([Segment(span, rows, logits_from=len(rows) - 1)], store)
        store.commit(span, range(len(rows)))
        request.tokens += choose(result.logits_NV, [Place(request)])
    return request.output


class Watched(Follow):
    """The default rule. `branched`: how often it accepted another path than the first."""

    branched = 0

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        verdicts = super().judge(requests, drafts, logits_NV)
        self.branched += sum(list(v.path) != list(range(len(v.path))) for v in verdicts)
        return verdicts


def engine_for(
    loaded: LoadedModel, spec: str, company: Company, verifier: Verifier, slots: int = 8192
) -> Engine:
    store = loaded.target.new_store(slots)
    context = DraftContext(
        loaded.target, store, loaded.tokenizer, lambda _: loaded, verifier.independent_noise
    )
    return Engine(
        loaded.target,
        store=store,
        verifier=verifier,
        drafter=make_drafter(spec, context),
        tokenizer=loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        max_num_seqs=company.sequences,
        max_batch_rows=company.rows,
        costs=company.costs,
    )


@dataclass
class Run:
    tokens: list[list[int]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)  # drafters of which a token was accepted
    preempted: bool = False


def run(engine: Engine, jobs: Jobs) -> Run:
    result = Run()
    streams = [stream for job in jobs for stream in engine.add(*job)]
    while engine.busy:
        for delta in engine.step():
            result.sources.update(delta.sources)
        result.preempted |= any(request.output for request in engine.scheduler.waiting)
    result.sources.discard("")  # the target itself
    result.tokens = [stream.request.output for stream in streams]
    return result


def needs_independent_rows(loaded: LoadedModel, spec: str) -> None:
    """Without them texts are equal up to ties, and there is nothing to compare bit for bit."""
    trees = any(DRAFTERS[part.name].makes_trees for part in parse(spec))
    info = loaded.target.info
    if not (info.tree_invariant if trees else info.row_invariant):
        pytest.skip(f"rows of {info.dtype} depend on each other without compiled kernels")


TRAINED = {"corpus", "medusa", "eagle", "eagle3", "dflash"}  # need files made for the model


def test_no_drafter_is_missing() -> None:
    assert {part.name for spec in SPECS for part in parse(spec)} == set(DRAFTERS) - TRAINED


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_rows_are_independent(model: Load, dtype: str) -> None:
    info = model(dtype).target.info
    assert info.row_invariant
    assert info.tree_invariant


@pytest.mark.parametrize(("spec", "sampling", "company", "dtype"), GRID)
def test_the_tokens_are_those_of_plain_decoding(
    model: Load, plain: Plain, spec: str, sampling: str, company: str, dtype: str
) -> None:
    loaded = model(dtype)
    needs_independent_rows(loaded, spec)
    jobs, expected = jobs_for(loaded, sampling), plain(sampling, dtype)
    engine = engine_for(loaded, spec, COMPANIES[company], Watched())
    result = run(engine, jobs)
    assert result.tokens == expected
    named = {name for source in result.sources for name in source.split("+")}
    assert named == {part.name for part in parse(spec)}, "each had a token accepted"
    stats = engine.stats
    if spec == ITSELF:
        assert stats.accepted_tokens == stats.draft_tokens, "who asks oneself is always right"
    elif spec != "none":
        assert stats.accepted_tokens < stats.draft_tokens, "something was refused"
    if spec == SHARED:  # once more, now that all answers are known
        assert run(engine, jobs).tokens == expected
        assert engine.stats.accepted_tokens > 2 * stats.accepted_tokens, "the past was used"


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_branches_and_preempted_requests_lead_to_the_same_tokens(
    model: Load, plain: Plain, dtype: str
) -> None:
    loaded = model(dtype)
    needs_independent_rows(loaded, "suffix")
    watched = Watched()
    engine = engine_for(loaded, "suffix", COMPANIES["five"], watched, slots=1280)
    result = run(engine, jobs_for(loaded, "greedy"))
    assert result.tokens == plain("greedy", dtype)
    assert result.preempted, "the store was full"
    assert watched.branched > 0, "a sibling was accepted"


def test_a_lossy_rule_would_be_seen(model: Load, plain: Plain) -> None:
    loaded = model("bfloat16")
    needs_independent_rows(loaded, "suffix")
    engine = engine_for(loaded, "suffix", COMPANIES["five"], make_verifier("typical"))
    assert run(engine, jobs_for(loaded, "top_p")).tokens != plain("top_p", "bfloat16")


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=SLOW) for dtype in DTYPES])
def test_the_settings_differ(plain: Plain, dtype: str) -> None:
    texts = [plain(sampling, dtype) for sampling in SAMPLINGS]
    assert all(one != other for one, other in itertools.combinations(texts, 2))
    lengths = [[len(tokens) for tokens in text] for text in texts]
    assert lengths[0] == lengths[1] == lengths[2]
    assert min(lengths[3]) < min(lengths[0]), "answers that end by themselves"
