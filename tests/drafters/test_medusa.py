"""`medusa:DIR` against literal heads on the target's own hidden states."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import drafting
import medusa_reference as reference
from drafting import request
from fakes import FakeTarget, random_rule
from forerun.core import Draft, Request, Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.medusa import Medusa
from forerun.errors import ConfigError
from forerun.interop import medusa
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment
from tiny import VOCAB, tiny_folder, tiny_llama
from tiny_heads import tiny_medusa, tiny_medusa_module

HEADS = 3


@dataclass(frozen=True)
class Models:
    folder: Path
    target: LoadedModel

    @property
    def model(self) -> Path:
        return self.folder / "target"

    def drafter(self, options: str = "", heads: str = "heads") -> Medusa:
        drafter = make_drafter(f"medusa:{self.folder / heads}{options}", self.context())
        assert isinstance(drafter, Medusa)
        return drafter

    def context(self) -> DraftContext:
        target = self.target.target
        return DraftContext(target, target.new_store(64), None, drafting.refuse)

    def states(self, tokens: list[int], tap: int | None = None) -> Tensor:
        """Taps of a pass over all tokens, [rows, 1, C]."""
        target = self.target.target
        store = target.new_store(128)
        span = store.open()
        store.reserve(span, len(tokens))
        taps = target.forward(
            [Segment(span, tokens)], store, [target.info.layers if tap is None else tap]
        ).taps_RTD
        assert taps is not None
        return taps

    def expected(self, tokens: list[int], heads: str = "heads") -> Tensor:
        """Logits [K, V] of the tokens that follow, by the literal reference."""
        weights = load_file(self.model / "model.safetensors")
        h_C = reference.final_norm(
            self.states(tokens[:-1])[-1, 0], weights["model.norm.weight"], 1e-5
        )
        module = medusa.read(self.folder / heads)
        tensors = medusa.numbered(module)
        return torch.stack(
            [
                reference.head_logits(h_C, tensors, k, 1, weights["lm_head.weight"])
                for k in range(module.config.heads)
            ]
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("medusa")
    target = tiny_llama(folder / "target", layers=3, seed=2)
    values: dict[str, Any] = {"heads": HEADS, "strength": 2.0}  # no two heads say the same
    tiny_medusa(folder / "heads", folder / "target", **values)
    values |= {"output": "target", "vocab_size": None}
    tiny_medusa(folder / "shared", folder / "target", "medusa", **values)
    return Models(folder, target)


def feed(drafter: Medusa, models: Models, *requests: Request, tap: int | None = None) -> None:
    """What the engine tells after a pass over all tokens but the last."""
    taps = [models.states(each.tokens[:-1], tap) for each in requests]
    drafter.observe(requests, [Verdict((), each.tokens[-1]) for each in requests], taps)


PROMPT = [3, 14, 15, 92, 65, 35, 89]


@pytest.mark.parametrize("heads", ["heads", "shared"])
def test_a_chain_is_the_best_token_of_each_head(models: Models, heads: str) -> None:
    drafter = models.drafter(",top_k=1", heads)
    given = request(PROMPT)
    feed(drafter, models, given)
    draft = drafting.propose(drafter, given)
    assert list(draft.tokens) == models.expected(PROMPT, heads).argmax(-1).tolist()
    assert len(set(draft.tokens)) > 1, "heads differ"
    assert draft.is_chain
    assert not drafter.makes_trees


def ranked(models: Models, top_k: int) -> list[list[tuple[int, float]]]:
    top = models.expected(PROMPT).softmax(-1).topk(top_k)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def test_a_tree_is_made_of_the_likeliest_paths(models: Models) -> None:
    places = ranked(models, 4)
    likeliest: dict[tuple[int, ...], float] = {}
    for depth in range(1, HEADS + 1):
        for path in itertools.product(*places[:depth]):
            chances = torch.tensor([chance for _, chance in path]).double()
            likeliest[tuple(token for token, _ in path)] = chances.prod().item()
    best = sorted(likeliest, key=likeliest.__getitem__, reverse=True)[:11]
    drafter = models.drafter(",nodes=11")
    given = request(PROMPT)
    feed(drafter, models, given)
    draft = drafting.propose(drafter, given)
    assert drafting.paths(draft) == set(best)
    for node, path in enumerate(list_paths(draft)):
        assert draft.survival[node] == pytest.approx(min(likeliest[path], 0.99), rel=1e-4)
    assert len(drafting.propose(drafter, given, budget=4)) == 4


def list_paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_a_static_tree_has_the_shape_of_its_file(models: Models, tmp_path: Path) -> None:
    shape = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(shape))
    drafter = models.drafter(f",tree={file}")
    given = request(PROMPT)
    feed(drafter, models, given)
    places = ranked(models, 2)
    expected = {tuple(places[d][rank][0] for d, rank in enumerate(path)) for path in shape}
    assert drafting.paths(drafting.propose(drafter, given)) == expected


@pytest.mark.parametrize("wrong", ["tap", "row"])
def test_states_from_elsewhere_propose_something_else(models: Models, wrong: str) -> None:
    """The control: one layer or one row off changes what is proposed."""
    drafter = models.drafter(",top_k=1")
    given = request(PROMPT)
    feed(drafter, models, given, tap=2 if wrong == "tap" else None)
    if wrong == "row":
        drafter.observe([given], [], [models.states(PROMPT[:-2])])
    tokens = list(drafting.propose(drafter, given).tokens)
    assert tokens != models.expected(PROMPT).argmax(-1).tolist()


def test_the_final_norm_matters(models: Models, tmp_path: Path) -> None:
    """The control: states in front of the norm lead to other logits."""
    weights = load_file(models.model / "model.safetensors")
    tensors = medusa.numbered(medusa.read(models.folder / "heads"))
    state_C = models.states(PROMPT[:-1])[-1, 0]
    bare = reference.head_logits(state_C, tensors, 0, 1, weights["lm_head.weight"])
    assert (bare - models.expected(PROMPT)[0]).abs().max() > 0.1


def test_requests_together_get_what_they_get_alone(models: Models) -> None:
    drafter = models.drafter()
    given = [request(PROMPT, id=0), request(PROMPT[:3], id=1), request([7] * 9, id=2)]
    given[2] = replace(given[2], params=given[2].params.model_copy(update={"temperature": 0.8}))
    feed(drafter, models, *given)
    together = drafter.propose(given, [8, 0, 8])
    assert together[1] == Draft()
    for each, draft in zip(given, together, strict=True):
        alone = models.drafter()
        feed(alone, models, each)
        if draft.tokens:
            assert alone.propose([each], [8])[0].tokens == draft.tokens


def test_a_pause_is_caught_up_and_a_release_forgets(models: Models) -> None:
    drafter = models.drafter(",top_k=1")
    given = request(PROMPT[:3])
    feed(drafter, models, given)
    given.tokens += PROMPT[3:]  # passes without a proposal
    feed(drafter, models, given)
    assert list(drafting.propose(drafter, given).tokens) == (
        models.expected(PROMPT).argmax(-1).tolist()
    )
    drafter.unfollow(given)
    assert drafting.propose(drafter, given) == Draft()
    feed(drafter, models, given)
    assert drafting.propose(drafter, given).tokens
    drafter.release(given)
    assert drafting.propose(drafter, given) == Draft()
    feed(drafter, models, given)  # preempted and computed anew
    assert drafting.propose(drafter, given).tokens


def test_nothing_follows_a_stop_token(models: Models) -> None:
    first = int(models.expected(PROMPT)[0].argmax())
    drafter = models.drafter(",top_k=1")
    given = request(PROMPT, stop=[first])
    feed(drafter, models, given)
    assert list(drafting.propose(drafter, given).tokens) == [first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",k=4", "3 heads and cannot look 4 tokens ahead"),
        (",tree={deep}", "3 heads and cannot look 4 tokens ahead"),
        (",tree={deep},k=2", "leaves nothing to k"),
        (",tree=/no/such/file", "there is no tree file"),
        (",topk=2", "did you mean 'top_k'"),
    ],
)
def test_options_that_cannot_be_used(
    models: Models, tmp_path: Path, options: str, message: str
) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    with pytest.raises(ConfigError, match=message):
        models.drafter(options.format(deep=deep))


def test_targets_that_do_not_fit_are_refused(models: Models, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", vocab=VOCAB + 1)
    module = tiny_medusa_module(other)
    medusa.export(module, "vllm", tmp_path / "heads")
    with pytest.raises(ConfigError, match=f"made for {VOCAB + 1} tokens"):
        make_drafter(f"medusa:{tmp_path / 'heads'}", models.context())
    with pytest.raises(ConfigError, match="reads inside the model"):
        drafting.make(f"medusa:{models.folder / 'heads'}", FakeTarget(random_rule()))


def test_medusa_2_runs_on_its_own_model_alone(models: Models, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "both", models.model, "medusa2")
    with pytest.raises(ConfigError, match=f"use --model {folder}"):
        make_drafter(f"medusa:{folder}", models.context())
    from forerun.models.hub import load

    target = load(str(folder), dtype="float32", device="cpu").target
    context = DraftContext(target, target.new_store(64), None, drafting.refuse)
    assert make_drafter(f"medusa:{folder}", context)
