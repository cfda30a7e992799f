"""Registering is testing: every drafter that exists is held to plain decoding, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fakes import FREE
from forerun.core import SamplingParams, StepStats
from forerun.drafters import DRAFTERS, DraftContext, make_drafter
from forerun.engine.engine import Engine
from forerun.models.hub import LoadedModel
from forerun.verify import make_verifier
from tiny import tiny_llama
from tiny_corpus import tiny_corpus
from tiny_heads import tiny_dflash, tiny_eagle, tiny_medusa

SPECS = [drafter.example for drafter in DRAFTERS.values()]
OTHER_SHAPES = [  # a tree where the example is a chain, and the other way round
    f"{DRAFTERS['medusa'].example},top_k=1",
    *(f"{DRAFTERS[name].example},top_k=3" for name in ("dflash", "eagle", "eagle3")),
]
COMBINED = [
    f"ngram+{DRAFTERS['model'].example}",
    f"{DRAFTERS['corpus'].example}+{DRAFTERS['medusa'].example}",
    f"ngram+suffix+{DRAFTERS['dflash'].example},top_k=3+{DRAFTERS['eagle3'].example},top_k=3",
]

SAMPLINGS = {
    "greedy": {"temperature": 0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,  # some repetition, or lookups would have nothing to say
    },
    "bias": {"temperature": 0.8, "logit_bias": {97: 6.0, 32: 5.0, 101: -100.0}},
}

# Batch 1, and batch 5 of mixed lengths: one token, a repetition, a long one that comes in chunks.
PROMPTS = {
    1: ["ab ab ab ab ab ab "],
    5: ["x", "the cat, the dog, the cat, the ", "hello world", "a b a b a b ", "forerun " * 12],
}


@dataclass(frozen=True)
class Models:
    target: LoadedModel
    draft: LoadedModel  # the same embedding and head, one layer instead of four
    trained: dict[str, Path]  # the folders of drafters made for the target

    def located(self, spec: str) -> str:
        """A spec with the folders of its drafters in place of the examples'."""
        return "+".join(map(self._located, spec.split("+")))

    def _located(self, spec: str) -> str:
        name, _, rest = spec.partition(":")
        if name not in self.trained:
            return spec
        _, *options = rest.split(",")
        return ",".join([f"{name}:{self.trained[name]}", *options])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", layers=4, seed=1)
    trained = {
        "corpus": tiny_corpus(folder / "corpus", target, PROMPTS[5]),
        "medusa": tiny_medusa(folder / "medusa", folder / "target"),
        "dflash": tiny_dflash(folder / "dflash", target.target.info),
        "eagle": tiny_eagle(folder / "eagle", target, "eagle"),
        "eagle3": tiny_eagle(folder / "eagle3", target, "eagle3"),
    }
    return Models(target, tiny_llama(folder / "draft", layers=1, seed=1), trained)


@pytest.fixture(scope="module")
def plain(models: Models):  # type: ignore[no-untyped-def]
    """Plain decoding, once per sampling and batch size."""
    return cache(lambda sampling, batch: decode(models, "none", "follow", sampling, batch)[0])


def decode(
    models: Models, spec: str, verifier: str, sampling: str, batch: int
) -> tuple[list[list[int]], StepStats]:
    target, tokenizer = models.target.target, models.target.tokenizer
    judge = make_verifier(verifier)
    store = target.new_store(1024)
    context = DraftContext(
        target, store, tokenizer, lambda _: models.draft, judge.independent_noise
    )
    engine = Engine(
        target,
        store=store,
        verifier=judge,
        drafter=make_drafter(models.located(spec), context),
        tokenizer=tokenizer,
        stop_ids=models.target.stop_ids,
        max_num_seqs=4,  # the fifth has to wait
        max_batch_rows=40,
        costs=FREE,
    )
    streams = []
    for i, prompt in enumerate(PROMPTS[batch]):
        params = SamplingParams(seed=i, max_tokens=40 + 7 * i, **SAMPLINGS[sampling])
        streams += engine.add(tokenizer.encode(prompt), params)
    while engine.busy:
        engine.step()
        store.check()
    assert store.free_slots == store.slots
    return [stream.request.output for stream in streams], engine.stats


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("spec", [*SPECS, *OTHER_SHAPES, *COMBINED])
def test_every_drafter_leaves_the_tokens_as_they_are(
    models: Models, plain, spec: str, sampling: str, batch: int
) -> None:
    tokens, stats = decode(models, spec, "follow", sampling, batch)
    assert tokens == plain(sampling, batch)
    assert stats.draft_tokens > stats.accepted_tokens, "something was refused"
    # A single random text may hold nothing that a lookup could find.
    assert stats.accepted_tokens > 0 or batch == 1, "something was accepted"


@pytest.mark.parametrize(
    ("verifier", "sampling"),
    [
        ("reference", "top_p"),
        ("reference", "penalties"),
        ("rejection", "greedy"),
        ("typical", "greedy"),
    ],
)
@pytest.mark.parametrize("spec", [*SPECS, *COMBINED])
def test_verifiers_agree_where_they_must(
    models: Models, plain, spec: str, verifier: str, sampling: str
) -> None:
    tokens, stats = decode(models, spec, verifier, sampling, 5)
    assert tokens == plain(sampling, 5)
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_lossy_verifier_would_be_seen(models: Models, plain, sampling: str) -> None:
    """The control: accepting what is merely plausible changes tokens unless they are greedy."""
    tokens, _ = decode(models, "model:draft", "typical", sampling, 5)
    assert (tokens == plain(sampling, 5)) == (sampling == "greedy")


def test_the_settings_differ(plain) -> None:
    outputs = [str(plain(sampling, 5)) for sampling in SAMPLINGS]
    assert len(set(outputs)) == len(SAMPLINGS)
