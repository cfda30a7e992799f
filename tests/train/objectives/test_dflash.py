from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import drafting
from drafting import request
from forerun.core import Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.dflash import DFlashDrafter
from forerun.errors import ConfigError
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel, load
from forerun.models.tokenizer import Tokenizer
from forerun.train.capture import Batch, Capture
from forerun.train.examples import Example
from forerun.train.objectives import blocks
from forerun.train.objectives.base import Loss, head_rows
from forerun.train.objectives.dflash import (
    DFlashObjective,
    DFlashSettings,
    reserved_token,
    spread_taps,
)
from forerun.train.vocabulary import Vocabulary, full
from learned_dflash import taps_of
from tiny import VOCAB as PLAIN
from tiny import tiny_folder, tiny_tokenizer

VOCAB = PLAIN + 3  # reserved tokens among them
DRAFT_IDS = torch.arange(0, VOCAB, 3)
BOTH = pytest.mark.parametrize("anchor_first", [False, True])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its laws leave little to chance: what they teach is what it writes."""
    folder = tiny_folder(tmp_path_factory.mktemp("target"), layers=4, seed=1, vocab=VOCAB)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load(str(folder), dtype="float32", device="cpu")


def objective(
    target: LoadedModel, vocabulary: Vocabulary | None = None, **values: Any
) -> DFlashObjective:
    """One whose layers matter."""
    noise = torch.Generator().manual_seed(0)
    settings = DFlashSettings(**{"block": 4, **values})
    return DFlashObjective(settings, target, vocabulary or full(VOCAB), noise)


def text(length: int, *spans: tuple[int, int], seed: int = 0) -> Example:
    """Random tokens, those in `spans` written by the assistant."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 250, (length,), generator=noise).tolist()
    written = [any(begin <= i < end for begin, end in spans) for i in range(length)]
    return Example(tokens, written, str(seed))


def capture(trained: DFlashObjective, *texts: Example) -> Batch:
    return Capture(trained.target, trained.taps)(texts)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(batch: Batch, anchors: list[list[int]], drafts: int) -> list[list[list[int]]]:
    """Per sequence and block, the rows of the tokens that are taught."""
    row_BAD, taught_BAD = blocks.taught(batch, torch.tensor(anchors), drafts)
    return [
        [row_D[taught_D].tolist() for row_D, taught_D in zip(*block, strict=True)]
        for block in zip(row_BAD, taught_BAD, strict=True)
    ]


# ---- blocks -------------------------------------------------------------------------------------


def test_what_the_slots_of_a_block_are_taught(target: LoadedModel) -> None:
    batch = capture(objective(target), text(8, (0, 8)))
    assert labels(batch, [[2, 5]], drafts=2) == [[[3, 4], [6, 7]]]
    assert labels(batch, [[2, 5]], drafts=3) == [[[3, 4, 5], [6, 7]]]


def test_what_is_taught_is_a_prefix_and_ends_with_the_sequence(target: LoadedModel) -> None:
    batch = capture(objective(target), text(12, (2, 5), (6, 12)), text(7, (3, 7)))
    assert labels(batch, [[2, 4, 8], [3, 5, 6]], drafts=3) == [
        [[3, 4], [], [9, 10, 11]],
        [[4, 5, 6], [6], []],
    ]


@BOTH
def test_anchors_are_what_the_engine_drafts_behind(target: LoadedModel, anchor_first: bool) -> None:
    batch = capture(objective(target), text(14, (2, 5), (7, 12)), text(7, (5, 7)))
    anchors_BA, used_BA = blocks.draw_anchors(batch, 99, anchor_first, draw())
    found = [sorted(each[used].tolist()) for each, used in zip(anchors_BA, used_BA, strict=True)]
    inside = [[2, 3, 7, 8, 9, 10], [5]]
    before = [[1, 6], [4]] if anchor_first else [[], []]
    assert found == [sorted(a + b) for a, b in zip(inside, before, strict=True)]


def test_anchors_are_drawn_anew_from_the_generator_alone(target: LoadedModel) -> None:
    batch = capture(objective(target), text(60, (2, 60)))
    first, again, other = (
        blocks.draw_anchors(batch, 5, False, draw(seed))[0].tolist() for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first[0])) == 5


def test_a_text_without_anchors_teaches_nothing(target: LoadedModel) -> None:
    trained = objective(target)
    found = trained.loss(capture(trained, text(7, (6, 7))), draw())
    assert (found.total.item(), found.count.item()) == (0, 0)
    found.total.backward()


def seen(trained: DFlashObjective, batch: Batch, anchors: list[int]) -> list[set[int]]:
    """Per block, the rows of the context whose states reach its slots, each all of them."""
    anchors_BA = torch.tensor([anchors])
    with torch.no_grad():
        before_ADC = trained.slots(batch, anchors_BA)[0]
        rows: list[set[int]] = [set() for _ in anchors]
        for row in range(batch.tokens_BR.shape[1]):
            batch.taps_BRTC[0, row] += 1
            after_ADC = trained.slots(batch, anchors_BA)[0]
            batch.taps_BRTC[0, row] -= 1
            moved_AD = (after_ADC - before_ADC).abs().amax(-1) > 1e-3
            assert torch.equal(moved_AD.any(1), moved_AD.all(1))
            for block in moved_AD.any(1).nonzero()[:, 0].tolist():
                rows[block].add(row)
    return rows


@BOTH
def test_a_block_sees_what_lies_before_its_anchor(target: LoadedModel, anchor_first: bool) -> None:
    trained = objective(target, block=3, anchor_first=anchor_first)
    batch = capture(trained, text(8, (0, 8)))
    assert seen(trained, batch, [2, 5]) == [{0, 1}, {0, 1, 2, 3, 4}]


def test_a_block_sees_its_own_slots_and_no_others(target: LoadedModel) -> None:
    trained = objective(target, block=3)
    batch = capture(trained, text(8, (0, 8)))
    anchors_BA = torch.tensor([[2, 5]])
    before_ADC = trained.slots(batch, anchors_BA)[0]
    batch.tokens_BR[0, 5] += 1
    moved_AD = (trained.slots(batch, anchors_BA)[0] - before_ADC).abs().amax(-1) > 1e-3
    assert moved_AD.tolist() == [[False, False], [True, True]]


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets blocks see the state of their anchor, which tells the next token."""

    def install() -> None:
        strict = blocks.Blocks.__init__

        def lax(self: blocks.Blocks, context_kv: Tensor, anchors_BA: Tensor) -> None:
            strict(self, context_kv, anchors_BA + 1)

        monkeypatch.setattr(blocks.Blocks, "__init__", lax)

    return install


def test_a_leak_of_the_label_is_noticed(target: LoadedModel, leak: Callable[[], None]) -> None:
    trained = objective(target, block=3)
    batch = capture(trained, text(8, (0, 8)))
    leak()
    assert seen(trained, batch, [2, 5]) == [{0, 1, 2}, {0, 1, 2, 3, 4, 5}]


# ---- the engine ---------------------------------------------------------------------------------


def engine_difference(
    trained: DFlashObjective, tokens: list[int], anchor: int, folder: Path
) -> float:
    """Between the logits of a block in training and in the engine's drafter."""
    target = trained.model
    trained.save(folder, trained.network.state_dict())
    context = DraftContext(target.target, target.target.new_store(64), None, drafting.refuse)
    drafter = make_drafter(trained.spec(folder), context)
    assert isinstance(drafter, DFlashDrafter)
    asked = request(tokens[: anchor + 1])
    asked.span = Span(0, 64)
    for upto in (1, anchor):
        begin, asked.span.length = asked.span.length, upto
        taps_RTE = taps_of(target, tokens[:upto], drafter.taps)[begin:]
        drafter.observe([asked], [Verdict((), tokens[upto])], [taps_RTE])
    state = drafter._contexts[asked.id]
    assert drafter._has_room(asked, state)
    drafted_DU = drafter._logits([asked], drafter._depth)[0]
    batch = capture(trained, Example(tokens, [True] * len(tokens), ""))
    others = [3, anchor, 12]  # blocks beside it change nothing
    hidden_DC = trained.slots(batch, torch.tensor([others]))[0, 1].detach()
    trained_DU = trained.network.logits(hidden_DC, trained.target.head_logits)
    ids_U = drafter._runner.ids_U
    kept = trained.vocabulary.ids_U
    assert torch.equal(kept, torch.arange(VOCAB) if ids_U is None else ids_U)
    return (drafted_DU - trained_DU).abs().max().item()


@BOTH
@pytest.mark.parametrize("ids_U", [torch.arange(VOCAB), DRAFT_IDS])
def test_the_engine_drafts_from_the_logits_of_training(
    target: LoadedModel, anchor_first: bool, ids_U: Tensor, tmp_path: Path
) -> None:
    trained = objective(target, Vocabulary(ids_U, VOCAB), anchor_first=anchor_first)
    tokens = text(20).tokens
    for anchor in (2, 7, 17):
        assert engine_difference(trained, tokens, anchor, tmp_path / str(anchor)) < 1e-4


def test_a_leak_is_no_drafting(
    target: LoadedModel, leak: Callable[[], None], tmp_path: Path
) -> None:
    trained = objective(target)
    leak()
    assert engine_difference(trained, text(20).tokens, 7, tmp_path) > 0.1


def test_the_keys_of_all_layers_are_normed_alike_whatever_is_learned(
    target: LoadedModel, tmp_path: Path
) -> None:
    trained = objective(target, layers=3)
    fit(trained, capture(trained, text(20, (4, 20))), steps=3)
    trained.save(tmp_path, trained.network.state_dict())
    saved = load_file(tmp_path / "model.safetensors")
    first, *others = (saved[f"layers.{i}.self_attn.k_norm.weight"] for i in range(3))
    assert all(torch.equal(first, other) for other in others)


# ---- the loss -----------------------------------------------------------------------------------


def literal_dpace(right_D: list[float]) -> list[float]:
    """By the definition, for a block whose slots are all taught."""
    smoothed = [0.5 * right + 0.5 for right in right_D]
    weights = []
    for j in range(len(right_D)):
        total = 0.0
        for last in range(j, len(right_D)):
            chance = 1.0
            for i in range(last + 1):
                chance *= smoothed[i]
            total += chance
        weights.append(total)
    return weights


def test_dpace_weighs_a_slot_by_the_drafts_that_need_it() -> None:
    right = [0.9, 0.2, 0.6]
    taught_BAD = torch.tensor([[[True, True, True], [True, True, False], [False] * 3]])
    right_BAD = torch.tensor([[right, right, right]])
    found_BAD = blocks.dpace(right_BAD, taught_BAD)
    expected = [literal_dpace(right), [*literal_dpace(right[:2]), 0.0], [0.0] * 3]
    torch.testing.assert_close(found_BAD[0], torch.tensor(expected))


def literal_loss(
    trained: DFlashObjective, batch: Batch, seed: int, settings: DFlashSettings, shift: int = 0
) -> Tensor:
    """Block by block and slot by slot, with the whole of the logits."""
    first = settings.anchor_first
    anchors_BA, used_BA = blocks.draw_anchors(batch, settings.anchors, first, draw(seed))
    hidden_BADC = trained.slots(batch, anchors_BA)
    ids_U = trained.vocabulary.ids_U
    rows_UC = head_rows(trained.target, ids_U)
    known = {int(token): u for u, token in enumerate(ids_U)}
    total, count = torch.zeros(()), 0.0
    for b, a in used_BA.nonzero().tolist():
        losses, learned = [], []
        for d, state_C in enumerate(hidden_BADC[b, a]):
            row = int(anchors_BA[b, a]) + 1 + d + shift
            if row >= int(batch.lengths_B[b]) or not batch.supervised_BR[b, row]:
                break
            logits_U = rows_UC @ state_C
            label = known.get(int(batch.tokens_BR[b, row]))
            if settings.labels == "soft":
                before_1C = batch.final_BRC[b, row - 1][None]
                law_U = trained.target.head_logits(before_1C)[0, ids_U].softmax(-1)
            else:
                law_U = functional.one_hot(torch.tensor(label or 0), len(ids_U)).float()
            losses.append(-(law_U * logits_U.log_softmax(-1)).sum())
            learned.append(settings.labels == "soft" or label is not None)
        chances = [
            float(torch.exp(-loss.detach())) if is_learned else 0.0
            for loss, is_learned in zip(losses, learned, strict=True)
        ]
        weights = literal_dpace(chances)
        if settings.weights == "decay":
            weights = [float(torch.exp(torch.tensor(-2 * d / settings.block))) for d in range(9)]
        for loss, weight, is_learned in zip(losses, weights, learned, strict=False):
            total = total + is_learned * weight * loss
            count += is_learned * weight
    return total / count


@BOTH
@pytest.mark.parametrize("weights", ["dpace", "decay"])
@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("ids_U", [torch.arange(VOCAB), DRAFT_IDS])
def test_the_loss_is_the_weighted_cross_entropy_of_the_taught_slots(
    target: LoadedModel, anchor_first: bool, weights: str, labels: str, ids_U: Tensor
) -> None:
    values = {"anchor_first": anchor_first, "weights": weights, "labels": labels, "anchors": 4}
    trained = objective(target, Vocabulary(ids_U, VOCAB), **values)
    settings = DFlashSettings(block=4, **values)
    batch = capture(trained, text(16, (4, 9), (11, 16)), text(9, (3, 9), seed=1))
    learned = [p for p in trained.network.parameters() if p.requires_grad]
    found = trained.loss(batch, draw(5)).total
    expected = literal_loss(trained, batch, 5, settings)
    torch.testing.assert_close(found, expected)
    got, wanted = torch.autograd.grad(found, learned), torch.autograd.grad(expected, learned)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@BOTH
def test_labels_one_row_off_are_another_loss(target: LoadedModel, anchor_first: bool) -> None:
    trained = objective(target, anchor_first=anchor_first)
    settings = DFlashSettings(block=4, anchor_first=anchor_first)
    batch = capture(trained, text(16, (4, 16)))
    shifted = literal_loss(trained, batch, 5, settings, shift=-1)
    assert (trained.loss(batch, draw(5)).total - shifted).abs() > 0.05


@BOTH
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_learns_eight_sequences_by_heart(
    target: LoadedModel, anchor_first: bool, labels: str
) -> None:
    trained = objective(target, anchor_first=anchor_first, labels=labels)
    batch = capture(trained, *(written(target, seed) for seed in range(8)))
    before = trained.loss(batch, draw())
    assert before.hits_P[0] / before.rows_P[0] < 0.5
    after = fit(trained, batch, steps=200)
    assert after.hits_P[0] / after.rows_P[0] > 0.95


def written(target: LoadedModel, seed: int, prompt: int = 4, length: int = 16) -> Example:
    """A random prompt, and what the target says next."""
    tokens = text(prompt, seed=seed).tokens
    while len(tokens) < length:
        states_RTC = taps_of(target, tokens, (target.target.info.layers,))
        normed_1C = target.target.final_norm(states_RTC[-1])  # type: ignore[attr-defined]
        tokens.append(int(target.target.head_logits(normed_1C).argmax()))  # type: ignore[attr-defined]
    return Example(tokens, [i >= prompt for i in range(length)], str(seed))


def fit(trained: DFlashObjective, batch: Batch, steps: int) -> Loss:
    """The loss behind so many steps."""
    learned = [p for p in trained.network.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(learned, lr=3e-3)
    for step in range(steps):
        optimiser.zero_grad()
        trained.loss(batch, draw(step)).total.backward()
        optimiser.step()
    return trained.loss(batch, draw())


# ---- what follows from the target ---------------------------------------------------------------


def test_taps_are_the_published_ones_or_all_of_a_few_layers() -> None:
    assert spread_taps(30) == (2, 9, 15, 21, 28)
    assert spread_taps(4) == (1, 2, 3, 4)


def test_the_mask_token_is_one_that_the_tokenizer_keeps_in_reserve(target: LoadedModel) -> None:
    assert reserved_token(target.tokenizer, VOCAB, target.stop_ids) == VOCAB - 1
    used = Tokenizer(tiny_tokenizer(), special_tokens=target.tokenizer.special_tokens)
    assert reserved_token(used, PLAIN + 2, frozenset()) == PLAIN + 1
    with pytest.raises(ConfigError, match="name one that your texts never contain with mask_token"):
        reserved_token(used, PLAIN, frozenset())
