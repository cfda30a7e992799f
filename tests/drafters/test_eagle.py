from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting import check, paths, refuse, request
from eagle_reference import Literal, LiteralDrafter
from forerun.core import Draft, Request, Verdict
from forerun.drafters import DraftContext, make_drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.tree import depths
from forerun.errors import ConfigError
from forerun.interop import eagle
from forerun.models.heads.eagle import Eagle3
from forerun.models.heads.eagle_runner import EagleRunner
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment
from tiny import tiny_llama
from tiny_heads import tiny_eagle, tiny_eagle_module

PROMPT = [(7 * i * i + 3) % 250 for i in range(9)]
FLAGS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "reduced": {"draft_vocab_size": 64, "norm_before_fc": True, "norm_before_residual": True},
    "window": {"sliding_window": 6, "qk_norm": True, "own_embedding": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=1)


def kind_of(name: str) -> str:
    return "eagle" if name == "eagle" else "eagle3"


@pytest.fixture(params=FLAGS)
def draft(request: pytest.FixtureRequest, target: LoadedModel, tmp_path: Path) -> tuple[str, Path]:
    """A random draft: its drafter and its folder."""
    kind = kind_of(request.param)
    module = tiny_eagle_module(target.target.info, kind, seed=3, **FLAGS[request.param])
    eagle.export(module, "vllm" if kind == "eagle" else "speculators", tmp_path / "draft")
    return kind, tmp_path / "draft"


@pytest.fixture
def eagle3(target: LoadedModel, tmp_path: Path) -> Path:
    return tiny_eagle(tmp_path / "eagle3", target)


class Session:
    """Decodes with a real target and tells a drafter what an engine would tell it."""

    def __init__(self, target: LoadedModel, spec: str, slots: int = 512) -> None:
        self.target = target.target
        self.store = self.target.new_store(slots)
        context = DraftContext(self.target, self.store, target.tokenizer, refuse)
        drafter = make_drafter(spec, context)
        assert isinstance(drafter, EagleDrafter)
        self.drafter = drafter
        self.features: dict[int, torch.Tensor] = {}

    def start(self, tokens: Sequence[int], id: int = 0, chunk: int = 99, **values: Any) -> Request:
        """A request whose prompt is cached but for the last token."""
        started = request(tokens, id=id, max_tokens=300, **values)
        started.span = self.store.open()
        while started.cached < len(started.tokens) - 1:
            self.cache(started, min(chunk, len(started.tokens) - 1 - started.cached))
        return started

    def cache(self, request: Request, rows: int) -> None:
        """Run the target over the next rows of a request."""
        assert request.span is not None
        self.store.reserve(request.span, rows)
        tokens = request.tokens[request.cached : request.cached + rows]
        segment = Segment(request.span, tokens, logits_from=rows)
        taps_RTC = self.target.forward([segment], self.store, self.drafter.taps).taps_RTD
        assert taps_RTC is not None
        self.store.commit(request.span, range(rows))
        old = self.features.get(request.id, torch.empty(0, *taps_RTC.shape[1:]))
        self.features[request.id] = torch.cat([old, taps_RTC])
        follows = Verdict((), request.tokens[request.cached])
        self.drafter.observe([request], [follows], [taps_RTC])

    def go_on(self, request: Request, tokens: Sequence[int]) -> None:
        """Commit tokens: all but the last are cached."""
        request.tokens += tokens
        self.cache(request, len(tokens))

    def propose(self, request: Request, budget: int = 64) -> Draft:
        (draft,) = self.drafter.propose([request], [budget])
        check(draft)
        assert len(draft) <= budget
        return draft

    def literal(self, request: Request, folder: Path, **shape: int) -> dict[tuple[int, ...], float]:
        """What the literal drafter proposes here."""
        module = eagle.read(folder)
        network = Literal(
            module,
            lambda token: self.target.embed(torch.tensor([token]))[0],
            lambda hidden: self.target.head_logits(hidden.float()[None])[0].double(),
        )
        taps_RTC = self.features[request.id]
        features_RF = taps_RTC.flatten(1)
        if not isinstance(module, Eagle3):
            features_RF = self.target.final_norm(taps_RTC[:, 0])
        return LiteralDrafter(network).propose(features_RF, request.tokens, **shape)


def chances(draft: Draft) -> dict[tuple[int, ...], float]:
    """Token path -> survival."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, draft.survival, strict=True))


def test_it_proposes_what_the_literal_drafter_says(
    target: LoadedModel, draft: tuple[str, Path]
) -> None:
    kind, folder = draft
    for spec, shape in (
        ("k=4", {"depth": 4, "top_k": 1, "nodes": 4}),
        ("k=4,top_k=3,nodes=14", {"depth": 4, "top_k": 3, "nodes": 14}),
    ):
        session = Session(target, f"{kind}:{folder},{spec},min_prob=0")
        asked = session.start(PROMPT)
        proposed = chances(session.propose(asked))
        assert proposed == pytest.approx(session.literal(asked, folder, **shape), abs=1e-5)
        assert len(proposed) == shape["nodes"]


@pytest.mark.parametrize(
    "change", [{"taps": (1, 2, 3)}, {"taps": (2, 1, 4)}, {"norm_before_residual": True}]
)
def test_a_shifted_tap_or_a_dropped_flag_would_be_seen(
    target: LoadedModel, eagle3: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    module = eagle.read(eagle3)
    right = Session(target, f"eagle3:{eagle3},min_prob=0")
    expected = right.literal(right.start(PROMPT), eagle3, depth=4, top_k=1, nodes=4)
    wrong = Eagle3(module.settings.model_copy(update=change))
    wrong.load_state_dict(module.state_dict())
    eagle.export(wrong, "vllm", tmp_path / "wrong")
    if change.get("taps") == (2, 1, 4):
        with pytest.raises(ConfigError, match="do not ascend"):
            Session(target, f"eagle3:{tmp_path / 'wrong'},min_prob=0")
        return
    session = Session(target, f"eagle3:{tmp_path / 'wrong'},min_prob=0")
    proposed = chances(session.propose(session.start(PROMPT)))
    assert proposed != pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("top_k", [1, 3])
def test_its_cache_follows_whatever_was_committed(
    target: LoadedModel, draft: tuple[str, Path], top_k: int
) -> None:
    """Full, partial and no acceptance and steps in which it was not asked: as from scratch."""
    kind, folder = draft
    dice = random.Random(top_k)
    spec = f"{kind}:{folder},k=3,top_k={top_k},nodes=7,min_prob=0"
    session = Session(target, spec)
    asked = session.start(PROMPT, chunk=4)
    for _ in range(6):
        session.drafter._calibration = Calibration()
        proposed = session.propose(asked)
        fresh = Session(target, spec)
        expected = fresh.propose(fresh.start(asked.tokens))
        assert chances(proposed) == pytest.approx(chances(expected), abs=1e-5)
        path = dice.choice([(), *sorted(paths(proposed))])
        session.go_on(asked, [*path, dice.randrange(250)])
        for _ in range(dice.randrange(3)):
            session.go_on(asked, [dice.randrange(250)])


def test_asking_twice_gives_the_same(target: LoadedModel, eagle3: Path) -> None:
    session = Session(target, f"eagle3:{eagle3},top_k=3")
    asked = session.start(PROMPT)
    assert session.propose(asked) == session.propose(asked)


def test_a_node_sees_its_own_path_alone(target: LoadedModel, eagle3: Path) -> None:
    """Each path of a tree, given as a chain of its own, has the same beliefs."""
    session = Session(target, f"eagle3:{eagle3},k=4,top_k=3,nodes=12,min_prob=0")
    asked = session.start(PROMPT)
    tree = chances(session.propose(asked))
    assert max(len(path) for path in tree) > 2
    for path, chance in tree.items():
        literal = session.literal(asked, eagle3, depth=4, top_k=3, nodes=12)
        assert literal[path] == pytest.approx(chance, abs=1e-5)


def test_a_batch_takes_one_pass_per_level(
    target: LoadedModel, draft: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, folder = draft
    spec = f"{kind}:{folder},k=4,top_k=2,nodes=14,min_prob=0"
    session = Session(target, spec)
    session.drafter._runner.rounds = None  # passes inside of compiled rounds cannot be counted
    batch = [session.start(PROMPT[: 3 + 2 * id], id=id) for id in range(3)]
    rows: list[int] = []
    run = EagleRunner.run

    def counted(self, packed, hidden_RC):  # type: ignore[no-untyped-def]
        rows.append(packed.rows)
        return run(self, packed, hidden_RC)

    monkeypatch.setattr(EagleRunner, "run", counted)
    drafts = session.drafter.propose(batch, [14, 0, 3])
    assert rows[:2] == [2 + 6, 4]
    assert 2 <= rows[2] <= 4, "nodes whose children could not be kept are not run"
    assert rows[3:] == [2]
    for asked, proposed, budget in zip(batch, drafts, [14, 0, 3], strict=True):
        alone = Session(target, spec)
        expected = alone.propose(alone.start(asked.tokens), budget)
        assert chances(proposed) == pytest.approx(chances(expected), abs=1e-5)
        assert len(proposed) == budget


def test_long_pauses_do_not_pile_up_features(
    target: LoadedModel, eagle3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.drafters.eagle.WAITING", 4)
    session = Session(target, f"eagle3:{eagle3},min_prob=0")
    asked = session.start(PROMPT, chunk=3)
    follower = session.drafter._followers[asked.id]
    assert follower.span.length == 6
    assert follower.unfed == 2
    expected = session.literal(asked, eagle3, depth=4, top_k=1, nodes=4)
    assert chances(session.propose(asked)) == pytest.approx(expected, abs=1e-5)


def test_what_is_no_longer_followed_takes_no_memory(target: LoadedModel, eagle3: Path) -> None:
    session = Session(target, f"eagle3:{eagle3},min_prob=0")
    asked = session.start(PROMPT)
    store = session.drafter._runner.store
    assert session.propose(asked)
    assert store.free_slots < store.slots
    session.drafter.unfollow(asked)
    assert session.propose(asked) == Draft()
    assert store.free_slots == store.slots
    session.drafter.unfollow(asked)  # as in every step from now on


def test_after_preemption_it_starts_again(target: LoadedModel, eagle3: Path) -> None:
    session = Session(target, f"eagle3:{eagle3},min_prob=0")
    asked = session.start(PROMPT)
    expected = session.propose(asked)
    session.drafter.release(asked)
    assert session.propose(asked) == Draft()
    assert asked.span
    session.store.release(asked.span)
    again = session.start(PROMPT, chunk=5)
    assert chances(session.propose(again)) == pytest.approx(chances(expected), abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_beyond_its_positions_it_proposes_nothing(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    folder = tiny_eagle(tmp_path / "short", target, max_length=12)
    session = Session(target, f"eagle3:{folder},k=4,top_k={top_k},nodes=20,min_prob=0")
    session.drafter._runner.rounds = None  # passes inside of compiled rounds cannot be watched
    asked = session.start(PROMPT)
    highest: list[int] = []
    run = EagleRunner.run

    def watched(self, packed, hidden_RC):  # type: ignore[no-untyped-def]
        highest.append(packed.length_S[0] + max(depths(packed.parent_N)))
        return run(self, packed, hidden_RC)

    monkeypatch.setattr(EagleRunner, "run", watched)
    deepest = {}
    while len(asked.tokens) < 18:
        proposed = session.propose(asked)
        deepest[len(asked.tokens)] = max((len(path) for path in paths(proposed)), default=0)
        session.go_on(asked, [5])
    assert deepest == {9: 4, 10: 4, 11: 3, 12: 2, 13: 1} | dict.fromkeys(range(14, 18), 0)
    assert max(highest) == 11
    assert asked.id not in session.drafter._followers, "its memory is given back"


def test_a_low_belief_ends_the_growth(target: LoadedModel, eagle3: Path) -> None:
    shallow = Session(target, f"eagle3:{eagle3},k=6,min_prob=0.9")
    asked = shallow.start(PROMPT)
    proposed = shallow.propose(asked)
    assert all(chance >= 0.9 for chance in proposed.survival[:-1])
    assert 1 <= len(proposed) < 6


def test_nothing_follows_the_end(target: LoadedModel, eagle3: Path) -> None:
    session = Session(target, f"eagle3:{eagle3},k=4,top_k=3,nodes=16,min_prob=0")
    free = session.propose(session.start(PROMPT))
    inner = next(free.tokens[parent] for parent in free.parents if parent >= 0)
    other = Session(target, f"eagle3:{eagle3},k=4,top_k=3,nodes=16,min_prob=0")
    ending = other.propose(other.start(PROMPT, stop=[inner]))
    assert inner in ending.tokens
    assert all(ending.tokens[parent] != inner for parent in ending.parents if parent >= 0)


def test_it_leaves_room_for_the_token_of_the_pass(target: LoadedModel, eagle3: Path) -> None:
    session = Session(target, f"eagle3:{eagle3},k=4,min_prob=0")
    asked = session.start(PROMPT)
    asked.params = asked.params.model_copy(update={"max_tokens": 3})
    assert len(session.propose(asked)) == 2


def test_the_json_form_drafts_a_chain(target: LoadedModel, eagle3: Path) -> None:
    spec = f'{{"method": "eagle3", "model": "{eagle3}", "num_speculative_tokens": 3}}'
    session = Session(target, spec)
    session.drafter._min_prob = 0
    proposed = session.propose(session.start(PROMPT))
    assert proposed.is_chain
    assert len(proposed) == 3


def test_what_does_not_fit_is_refused(target: LoadedModel, eagle3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write eagle3:"):
        Session(target, f"eagle:{eagle3}")
    with pytest.raises(ConfigError, match="write eagle:"):
        Session(target, f"eagle3:{tiny_eagle(tmp_path / 'one', target, 'eagle')}")
    unnamed = tiny_eagle(tmp_path / "unnamed", target, taps=None)
    with pytest.raises(ConfigError, match="2, 2, 1, which do not ascend"):
        Session(target, f"eagle3:{unnamed}")
    other = tiny_llama(tmp_path / "other", vocab=300, layers=4)
    with pytest.raises(ConfigError, match="made for 259 tokens"):
        Session(other, f"eagle3:{eagle3}")
    deep = tiny_eagle(tmp_path / "deep", target, taps=(2, 4, 5))
    with pytest.raises(ConfigError, match="within the 4 layers"):
        Session(target, f"eagle3:{deep}")
