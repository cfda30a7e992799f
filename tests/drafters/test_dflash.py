from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from drafting import make, paths, propose, request
from forerun import sampling
from forerun.core import Request, Verdict
from forerun.drafters.dflash import DFlashDrafter
from forerun.drafters.dflash_check import self_check
from forerun.errors import ConfigError
from forerun.interop import dflash as checkpoint
from forerun.models.cache import Span
from forerun.models.heads.dflash import DFlash, Injected, LayerAttention
from forerun.models.hub import LoadedModel, load
from forerun.sampling import Place
from learned_dflash import GREEDY, PROMPTS, SAMPLED, Trained, decode, learn, taps_of
from tiny import tiny_folder, tiny_llama
from tiny_heads import tiny_dflash_module

KINDS: dict[str, dict[str, Any]] = {
    "in place": {},
    "anchor first": {"anchor_first": True},
    "sliding": {
        "attention": (LayerAttention(window=6, causal=True), LayerAttention()),
        "window_from_anchor": True,
    },
    "own head": {"draft_vocab_size": 100, "own_embedding": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=1)


networks: WeakKeyDictionary[DFlashDrafter, DFlash] = WeakKeyDictionary()


@pytest.fixture
def drafter_of(target: LoadedModel, tmp_path: Path) -> Callable[..., DFlashDrafter]:
    def build(spec: str = "", **numbers: Any) -> DFlashDrafter:
        module = tiny_dflash_module(target.target.info, **numbers)
        checkpoint.export(module, "speculators", tmp_path / "draft")
        drafter = make(f"dflash:{tmp_path / 'draft'}{spec}", target.target)  # type: ignore[arg-type]
        assert isinstance(drafter, DFlashDrafter)
        networks[drafter] = module
        return drafter

    return build


# ---- one round ----------------------------------------------------------------------------------


def cache(target: LoadedModel, drafter: DFlashDrafter, request: Request, upto: int) -> None:
    """Let the target have run all tokens up to `upto`, and the drafter observe it."""
    request.span = request.span or Span(0, 512)
    begin = request.span.length
    request.span.length = upto
    taps_RTE = taps_of(target, request.tokens[:upto], drafter.taps)[begin:]
    drafter.observe([request], [Verdict((), request.tokens[upto])], [taps_RTE])


def slots_of(
    target: LoadedModel, module: DFlash, tokens: Sequence[int], width: int
) -> tuple[Tensor, Tensor]:
    """Logits of the drafting slots [D, V] from scratch, and the ids of their columns."""
    anchor = len(tokens) - 1
    context_1K = torch.arange(anchor)[None]
    positions_1Q = anchor + torch.arange(width)[None]
    block = torch.tensor([tokens[-1], *[module.config.mask_token] * (width - 1)])
    memory = Injected(
        module.context_kv(taps_of(target, tokens, module.config.taps)[None, :-1], context_1K),
        module.visible(positions_1Q, torch.full_like(positions_1Q, anchor), context_1K),
    )
    rows = module.embed(block, target.target.embed)  # type: ignore[attr-defined]
    hidden_QC = module(rows[None], positions_1Q, memory)[0]
    logits = module.logits(
        hidden_QC[module.config.first_slot :],
        target.target.head_logits,  # type: ignore[attr-defined]
    )
    ids = module.token_ids
    return logits, torch.arange(logits.shape[1]) if ids is None else ids


def chain_of(target: LoadedModel, drafter: DFlashDrafter, tokens: Sequence[int]) -> list[int]:
    logits_DU, ids_U = slots_of(target, networks[drafter], tokens, drafter._width)
    return ids_U[logits_DU.argmax(-1)].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_a_pass_from_scratch(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter], kind: str
) -> None:
    """Prompts in chunks, any number of accepted tokens, rounds in which nothing was asked."""
    drafter = drafter_of(**KINDS[kind])
    dice = random.Random(3)
    asked = request([dice.randrange(250) for _ in range(20)])
    cache(target, drafter, asked, 7)
    for _ in range(12):
        cache(target, drafter, asked, len(asked.tokens) - 1)
        if dice.random() < 0.7:
            assert propose(drafter, asked).tokens == chain_of(target, drafter, asked.tokens)
        asked.tokens += [dice.randrange(250) for _ in range(dice.randrange(1, 5))]


def test_what_is_kept_equals_what_is_computed_at_once(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    drafter = drafter_of()
    asked = request(list(range(30)))
    for upto in (4, 5, 11, 12, 29):
        cache(target, drafter, asked, upto)
        context = drafter._contexts[asked.id]
        assert drafter._has_room(asked, context)
        drafter._settle([context])
        propose(drafter, asked)
    span = drafter._contexts[asked.id].span
    assert span.length == 29
    taps_RTE = taps_of(target, asked.tokens[:29], drafter.taps)
    whole = networks[drafter].context_kv(taps_RTE[None], torch.arange(29)[None])[:, :, 0]
    kept = drafter._runner.store.kv[:, :, :, span.base : span.base + 29]
    assert torch.allclose(kept, whole, atol=1e-5)


def test_a_batch_is_one_pass(
    target: LoadedModel,
    drafter_of: Callable[..., DFlashDrafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = drafter_of(**KINDS["sliding"])
    drafter._runner.rounds = None  # passes inside of compiled rounds cannot be counted
    requests = [request([5 * id + i for i in range(4 + 9 * id)], id=id) for id in range(3)]
    for each in requests:
        cache(target, drafter, each, len(each.tokens) - 1)
    passes = []
    logits = drafter._runner.logits
    monkeypatch.setattr(
        drafter._runner, "logits", lambda packed: passes.append(packed.rows) or logits(packed)
    )
    drafts = drafter.propose(requests, [9, 0, 2])
    assert passes == [2 * 5]
    expected = [chain_of(target, drafter, each.tokens) for each in requests]
    assert [list(draft.tokens) for draft in drafts] == [expected[0], [], expected[2][:2]]


def test_survival_is_the_networks_own_probability_at_first(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    drafter = drafter_of()
    asked = request(list(range(9)))
    cache(target, drafter, asked, 8)
    draft = propose(drafter, asked)
    logits_DV, _ = slots_of(target, networks[drafter], asked.tokens, drafter._width)
    expected = logits_DV.softmax(-1).max(-1).values.cumprod(0)
    assert draft.survival == pytest.approx(expected.tolist(), rel=1e-4)


def test_a_tree_holds_the_chain_and_one_candidate_is_the_chain(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    asked = request(list(range(9)))
    drafts = []
    for spec in ("", ",top_k=1,nodes=9", ",top_k=3,nodes=12", ",top_k=3"):
        drafter = drafter_of(spec)
        asked.span = None
        cache(target, drafter, asked, 8)
        drafts.append(propose(drafter, asked))
        assert drafter.makes_trees == ("top_k=3" in spec)
    chain, same, tree, larger = drafts
    assert (same.tokens, same.parents) == (chain.tokens, chain.parents)
    assert [len(tree), len(larger)] == [12, 16]
    assert not tree.is_chain
    assert tuple(chain.tokens[:2]) in paths(tree)
    assert paths(tree) < paths(larger)


def test_sampled_proposals_share_the_noise_of_the_request(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    """What the target would choose if its logits were those of the draft."""
    drafter = drafter_of()
    asked = request(list(range(9)), **SAMPLED, presence_penalty=1.5, logit_bias={97: 2.0})
    cache(target, drafter, asked, 8)
    logits_DV, _ = slots_of(target, networks[drafter], asked.tokens, drafter._width)
    expected: list[int] = []
    for logits_V in logits_DV:
        expected += sampling.choose(logits_V[None], [Place(asked, expected)])
    assert propose(drafter, asked).tokens == expected
    assert expected != logits_DV.argmax(-1).tolist()


def test_it_keeps_its_limits(target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]) -> None:
    drafter = drafter_of()
    asked = request(list(range(9)))
    assert not propose(drafter, asked).tokens  # nothing was observed
    cache(target, drafter, asked, 8)
    chain = propose(drafter, asked).tokens
    assert len(chain) == 4
    assert propose(drafter, asked, budget=2).tokens == chain[:2]
    asked.stop_ids = frozenset(chain[1:2])
    shorter = chain[: chain.index(chain[1]) + 1]
    assert propose(drafter, asked).tokens == shorter != chain
    drafter.release(asked)
    assert not propose(drafter, asked).tokens


def test_a_narrower_block_is_another_block(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    """As in vLLM, k is the width of the block: its slots see each other."""
    drafter = drafter_of(",k=2")
    asked = request(list(range(9)))
    cache(target, drafter, asked, 8)
    assert propose(drafter, asked).tokens == chain_of(target, drafter, asked.tokens)
    assert drafter._width == 3


def test_a_request_that_outgrew_the_draft_goes_on_without(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    drafter = drafter_of(max_length=16)
    asked = request(list(range(10)))
    for length, drafted in ((10, 4), (12, 4), (13, 0), (14, 0)):
        asked.tokens += range(len(asked.tokens), length)
        cache(target, drafter, asked, length - 1)
        assert len(propose(drafter, asked).tokens) == drafted
    assert not drafter._contexts


def test_a_request_without_room_goes_on_without(target: LoadedModel, tmp_path: Path) -> None:
    """14 slots hold the context of one request and a block of five, not those of another."""
    checkpoint.export(tiny_dflash_module(target.target.info), "speculators", tmp_path / "draft")
    small = {"store": target.target.new_store(14)}
    drafter = make(f"dflash:{tmp_path / 'draft'}", target.target, **small)  # type: ignore[arg-type]
    assert isinstance(drafter, DFlashDrafter)
    first, second = (request(list(range(9)), id=id) for id in range(2))
    for asked in (first, second):
        cache(target, drafter, asked, 8)
    drafts = drafter.propose([first, second], [4, 4])
    assert [len(draft) for draft in drafts] == [4, 0]
    drafter.release(first)
    assert not propose(drafter, second).tokens, "what was forgotten cannot be caught up"


def test_a_gap_in_what_was_seen_ends_the_drafts(
    target: LoadedModel, drafter_of: Callable[..., DFlashDrafter]
) -> None:
    """A step that was interrupted between commit and observe."""
    drafter = drafter_of()
    asked = request(list(range(12)))
    cache(target, drafter, asked, 5)
    assert asked.span
    asked.span.length = 7
    cache(target, drafter, asked, 11)
    assert not propose(drafter, asked).tokens


def test_what_waits_is_bounded(
    target: LoadedModel,
    drafter_of: Callable[..., DFlashDrafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forerun.drafters.dflash.WAITING", 8)
    drafter = drafter_of()
    asked = request(list(range(40)))
    for upto in range(3, 39, 3):
        cache(target, drafter, asked, upto)
        assert drafter._contexts[asked.id].unsettled < 8
    cache(target, drafter, asked, 39)
    assert propose(drafter, asked).tokens == chain_of(target, drafter, asked.tokens)


@pytest.mark.parametrize(
    ("numbers", "spec", "message"),
    [
        ({}, ",k=5", "trained to draft 4 tokens; use k=4 or less"),
        ({"target_hidden_size": 64}, "", "hidden states of size 64"),
        ({"vocab_size": 300}, "", "made for 300 tokens"),
        ({"taps": (1, 7), "target_layers": 8}, "", "reads behind layer 7"),
        ({}, ",slots=check", "needs a tokenizer"),
        ({}, ",slots=left", "slots"),
    ],
)
def test_what_does_not_fit_is_refused(
    drafter_of: Callable[..., DFlashDrafter], numbers: dict[str, Any], spec: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_of(spec, **numbers)


def test_a_target_that_lends_nothing_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    checkpoint.export(tiny_dflash_module(target.target.info), "zlab", tmp_path / "draft")
    with pytest.raises(ConfigError, match="choose ngram or suffix"):
        make(f"dflash:{tmp_path / 'draft'}")


def test_the_embedding_is_lent_without_the_targets_own_scale(target: LoadedModel) -> None:
    """Gemma multiplies its embedding; published drafts bring a factor of their own or none."""
    decoder = copy(target.target)
    decoder.config = replace(decoder.config, embedding_scale=4.0)  # type: ignore[attr-defined]
    tokens = torch.tensor([5, 250])
    rows = decoder.embedding_VC[tokens]  # type: ignore[attr-defined]
    assert torch.equal(decoder.embed(tokens, scaled=False), rows)  # type: ignore[attr-defined]
    assert torch.equal(decoder.embed(tokens), 4 * rows)  # type: ignore[attr-defined]


def test_a_draft_in_bfloat16_runs_packed(tmp_path: Path) -> None:
    loaded = load(str(tiny_folder(tmp_path / "target", layers=4)), dtype="bfloat16", device="cpu")
    module = tiny_dflash_module(loaded.target.info, anchor_first=True)
    checkpoint.export(module, "speculators", tmp_path / "draft")
    plain, _ = decode(loaded, "none", GREEDY)
    text, stats = decode(loaded, f"dflash:{tmp_path / 'draft'}", GREEDY)
    assert stats.accepted_tokens > 0
    if loaded.target.info.row_invariant:
        assert text == plain


# ---- in the engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, {"temperature": 0, "logit_bias": {97: 3.0}}])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_draft_changes_the_text(
    target: LoadedModel, tmp_path: Path, kind: str, params: dict[str, Any]
) -> None:
    module = tiny_dflash_module(target.target.info, **KINDS[kind])
    checkpoint.export(module, "speculators", tmp_path / "draft")
    plain, _ = decode(target, "none", params)
    for spec in ("", ",top_k=4"):
        text, stats = decode(target, f"dflash:{tmp_path / 'draft'}{spec}", params)
        assert text == plain
        assert stats.draft_tokens > stats.accepted_tokens


def test_preempted_requests_catch_up(target: LoadedModel, tmp_path: Path) -> None:
    module = tiny_dflash_module(target.target.info, anchor_first=True)
    checkpoint.export(module, "speculators", tmp_path / "draft")
    spec = f"dflash:{tmp_path / 'draft'},top_k=4"
    plain, _ = decode(target, "none", GREEDY)
    text, stats = decode(target, spec, GREEDY, slots=180)
    assert text == plain
    assert stats.accepted_tokens > 0


# ---- trained drafts: what is right in a round is right in the end -------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["in place", "anchor first"])
def trained(target: LoadedModel, request: pytest.FixtureRequest) -> Trained:
    return learn(target, request.param)


def accepted(target: LoadedModel, module: DFlash, folder: Path, spec: str = "") -> float:
    checkpoint.export(module, "speculators", folder)
    _, stats = decode(target, f"dflash:{folder}{spec}", GREEDY, max_tokens=60)
    return stats.acceptance_length


def changed(module: DFlash, **update: Any) -> DFlash:
    other = DFlash(module.config.model_copy(update=update))
    other.load_state_dict(module.state_dict())
    return other.requires_grad_(False)


def test_a_trained_draft_is_accepted_and_no_other_reading_of_it(
    target: LoadedModel, trained: Trained, tmp_path: Path
) -> None:
    module = trained.module
    right = accepted(target, module, tmp_path / "right")
    assert right > 0.8 * (1 + module.config.drafts)
    for tap in (-1, 1):
        taps = tuple(boundary + tap for boundary in module.config.taps)
        assert accepted(target, changed(module, taps=taps), tmp_path / f"{tap}") < 0.6 * right
    swapped = changed(module, anchor_first=not module.config.anchor_first)
    assert accepted(target, swapped, tmp_path / "swapped") < 0.6 * right
    for update in ({"rope_theta": 50.0}, {"mask_token": 3}):
        assert accepted(target, changed(module, **update), tmp_path / "other") < 0.9 * right


def test_the_self_check_finds_the_slots(
    target: LoadedModel, trained: Trained, tmp_path: Path
) -> None:
    module = trained.module
    anchor_first = module.config.anchor_first
    found = self_check(module, target.target, target.tokenizer.encode(PROMPTS[1]))  # type: ignore[arg-type]
    assert found.says_anchor_first == anchor_first
    rates = found.anchor_first, found.in_place
    assert max(rates) > 0.8 > 0.5 > min(rates)
    swapped = changed(module, anchor_first=not anchor_first)
    checkpoint.export(swapped, "speculators", tmp_path / "draft")
    context = {"tokenizer": target.tokenizer}
    spec = f"dflash:{tmp_path / 'draft'},slots="
    forced = make(spec + ("anchor-first" if anchor_first else "in-place"), target.target, **context)  # type: ignore[arg-type]
    assert isinstance(forced, DFlashDrafter)
    assert forced._runner.config.anchor_first == anchor_first


def test_the_self_check_refuses_what_predicts_nothing(target: LoadedModel, tmp_path: Path) -> None:
    module = tiny_dflash_module(target.target.info)
    checkpoint.export(module, "zlab", tmp_path / "draft")
    with pytest.raises(ConfigError, match="whichever slot drafts"):
        make(
            f"dflash:{tmp_path / 'draft'},slots=check",
            target.target,  # type: ignore[arg-type]
            tokenizer=target.tokenizer,
        )
