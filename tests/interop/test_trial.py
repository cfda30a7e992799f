"""Drafts tried on the target's own text: healthy ones are not accused, others are found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting import refuse, request
from forerun.core import Request
from forerun.drafters import DraftContext, make_drafter
from forerun.errors import ConfigError
from forerun.interop import dflash, eagle, eagle_trial, formats, medusa, medusa_trial
from forerun.interop.trial import Speech, Trial, is_better, speak
from forerun.models.cache import Span
from forerun.models.hub import LoadedModel, load
from learned_drafts import learn_dflash, learn_eagle, learn_medusa
from tiny import tiny_folder, tiny_llama
from tiny_heads import tiny_eagle_module, tiny_medusa_module

TAPS = (1, 2, 3)
KINDS = ("medusa", "eagle", "eagle3", "dflash")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One that repeats itself little, so that a draft must look at what it is fed."""
    return tiny_llama(tmp_path_factory.mktemp("trial") / "model", layers=4, seed=6)


@pytest.fixture(scope="module")
def speeches(model: LoadedModel) -> list[Speech]:
    return speak(model)


@pytest.fixture(scope="module")
def learned(model: LoadedModel, speeches: list[Speech]) -> Path:
    """A healthy draft of each kind."""
    folder = Path(model.name).parent
    eagle.export(learn_eagle(model, speeches, "eagle"), "vllm", folder / "eagle")
    eagle.export(learn_eagle(model, speeches, taps=TAPS), "vllm", folder / "eagle3")
    medusa.export(learn_medusa(model, Path(model.name), speeches), "vllm", folder / "medusa")
    dflash.export(learn_dflash(model, speeches, taps=(1, 3)), "zlab", folder / "dflash")
    return folder


def attempt(folder: Path, model: LoadedModel) -> Trial:
    trial = formats.attempt(folder, model.target.info, lambda: model)
    assert trial
    return trial


def accusations(trial: Trial) -> list[str]:
    return [sentence for sentence in trial.sentences("it") if sentence.startswith("! ")]


def altered(folder: Path, out: Path, **values: Any) -> Path:
    """The same weights under another config.json."""
    out.mkdir(parents=True)
    (out / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | values))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_draft_is_not_accused(model: LoadedModel, learned: Path, kind: str) -> None:
    trial = attempt(learned / kind, model)
    assert len(trial.right_AK) > 100
    assert trial.right_AK.float().mean() > 0.8
    assert not accusations(trial)
    assert trial.others or kind == "eagle", "nothing else was tried"


def test_shifted_taps_are_named_and_the_remedy_cures(
    model: LoadedModel, learned: Path, tmp_path: Path
) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    healthy = attempt(learned / "eagle3", model).right_AK
    for by in (-1, 1):
        shifted = [tap + by for tap in TAPS]
        folder = altered(learned / "eagle3", tmp_path / str(by), **{key: shifted})
        trial = attempt(folder, model)
        (accusation,) = accusations(trial)
        assert "before layers 1, 2, 3" in accusation
        assert f"write {key} [1, 2, 3] at the top" in accusation
        assert trial.better
        assert torch.equal(trial.better.right_AK, healthy)
        cured = altered(folder, tmp_path / f"cured{by}", **{key: [1, 2, 3]})
        assert not accusations(attempt(cured, model))


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_wrong_norm_flag_is_named(
    model: LoadedModel, learned: Path, tmp_path: Path, flag: str
) -> None:
    folder = altered(learned / "eagle3", tmp_path / "wrong", **{flag: True})
    (accusation,) = accusations(attempt(folder, model))
    assert f"with {flag} false" in accusation


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_wrong_rotary_base_is_named(
    model: LoadedModel, learned: Path, tmp_path: Path, kind: str
) -> None:
    rope = {"rope_type": "default", "rope_theta": 3.0}
    folder = altered(
        learned / kind, tmp_path / "wrong", rope_theta=3.0, rope_parameters=rope, rope_scaling=None
    )
    assert any("that of" in line for line in formats.describe(folder, model.target.info))
    (accusation,) = accusations(attempt(folder, model))
    assert "with rotary base 10000" in accusation


def test_a_random_embedding_is_named(model: LoadedModel, learned: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong"
    path.mkdir()
    (path / "config.json").write_text((learned / "eagle3" / "config.json").read_text())
    table_VC = torch.randn(model.target.info.vocab_size, model.target.info.hidden_size)
    weights = load_file(learned / "eagle3" / "model.safetensors")
    save_file(weights | {"embed_tokens.weight": table_VC}, path / "model.safetensors")
    (accusation,) = accusations(attempt(path, model))
    assert "with the target's embedding" in accusation
    assert "remove embed_tokens.weight" in accusation


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_taps_of_dflash(model: LoadedModel, learned: Path, tmp_path: Path, by: int) -> None:
    config = json.loads((learned / "dflash" / "config.json").read_text())
    right = config["dflash_config"]["target_layer_ids"]
    shifted = config["dflash_config"] | {"target_layer_ids": [layer + by for layer in right]}
    if right[0] + by < 0:
        shifted["target_layer_ids"] = None
        folder = altered(
            learned / "dflash",
            tmp_path / "wrong",
            eagle_aux_hidden_state_layer_ids=[0, 2],
            dflash_config=shifted,
        )
    else:
        folder = altered(learned / "dflash", tmp_path / "wrong", dflash_config=shifted)
    (accusation,) = accusations(attempt(folder, model))
    assert "with the outputs of layers 0, 2" in accusation


def test_the_other_slot_layout(model: LoadedModel, learned: Path, tmp_path: Path) -> None:
    config = json.loads((learned / "dflash" / "config.json").read_text())
    inner = config["dflash_config"] | {"sample_from_anchor": True}
    folder = altered(learned / "dflash", tmp_path / "wrong", dflash_config=inner)
    (accusation,) = accusations(attempt(folder, model))
    assert "with blocks that draft in place" in accusation
    assert "slots=in-place" in accusation


def test_heads_in_another_order(model: LoadedModel, speeches: list[Speech], learned: Path) -> None:
    heads = medusa.read(learned / "medusa")
    blocks, matrices = list(heads.blocks), list(heads.lm_heads)
    for place, head in enumerate((1, 2, 0)):
        heads.blocks[place], heads.lm_heads[place] = blocks[head], matrices[head]
    (accusation,) = accusations(medusa_trial.trial(heads, model.target, speeches))
    assert "guessing 2, 3, 1 places on" in accusation
    assert "another order" in accusation


def test_untrained_heads_repeat_the_target(model: LoadedModel, speeches: list[Speech]) -> None:
    heads = tiny_medusa_module(Path(model.name), strength=0, output="target", vocab_size=None)
    (accusation,) = accusations(medusa_trial.trial(heads, model.target, speeches))
    assert "guessing 0, 0, 0 places on" in accusation
    assert "not trained" in accusation


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_random_draft_is_near_chance_and_nothing_helps(
    model: LoadedModel, speeches: list[Speech], kind: str
) -> None:
    for seed in range(5):
        draft = tiny_eagle_module(model.target.info, kind, seed=seed)
        trial = eagle_trial.trial(draft, model.target, speeches)
        (accusation,) = accusations(trial)
        assert "little more than chance" in accusation
        assert trial.facts()["near_chance"] is True
        assert trial.better is None


@pytest.fixture(scope="module")
def half_learned(model: LoadedModel, speeches: list[Speech], learned: Path) -> Path:
    """Drafts that are right now and then."""
    folder, few = learned / "half", {"rounds": 8}
    eagle.export(learn_eagle(model, speeches, "eagle", **few), "vllm", folder / "eagle")
    window = learn_eagle(model, speeches, taps=TAPS, sliding_window=30, **few)
    eagle.export(window, "speculators", folder / "eagle3", model.name)
    heads = learn_medusa(model, Path(model.name), speeches, **few)
    medusa.export(heads, "vllm", folder / "medusa")
    dflash.export(learn_dflash(model, speeches, taps=(1, 3), **few), "zlab", folder / "dflash")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_says_what_a_drafter_does(
    model: LoadedModel, half_learned: Path, speeches: list[Speech], kind: str
) -> None:
    """The chain that each drafter proposes at every place of a text."""
    store = model.target.new_store(256)
    options = ",min_prob=0" if kind.startswith("eagle") else ""
    spec = f"{kind}:{half_learned / kind},top_k=1{options}"
    drafter = make_drafter(spec, DraftContext(model.target, store, None, refuse))
    trial = attempt(half_learned / kind, model)
    depth = trial.right_AK.shape[1]
    ahead = depth if kind.startswith("eagle") else depth + 1
    speech = speeches[0]
    places = speech.places(ahead).tolist()
    kept = []
    for place in places:
        chain = _proposed(drafter, speech, place)
        truth = speech.tokens[place + 1 : place + 1 + depth]
        kept.append(next((k for k in range(depth) if chain[k] != truth[k]), depth))
    assert kept == trial.right_AK[: len(places)].long().cumprod(1).sum(1).tolist()
    assert len(set(kept)) > 1, "equal whatever is compared"


def _proposed(drafter: Any, speech: Speech, place: int) -> Sequence[int]:
    one: Request = request(speech.tokens[: place + 1], id=place)
    one.span = Span(0, place)
    one.span.length = place
    drafter.observe([one], [], [speech.taps_RBC[:place, list(drafter.taps)]])
    (draft,) = drafter.propose([one], [16])
    drafter.release(one)
    tokens: Sequence[int] = draft.tokens
    return tokens


def test_luck_is_not_better() -> None:
    noise = torch.Generator().manual_seed(0)
    for _ in range(100):
        one, other = (torch.rand(150, 4, generator=noise) < 0.3 for _ in range(2))
        assert not is_better(one, other)
    few = torch.rand(150, 4, generator=noise) < 0.05
    many = torch.rand(150, 4, generator=noise) < 0.5
    assert is_better(many, few)
    assert not is_better(few, many)


def test_a_draft_that_does_not_fit_is_not_tried(learned: Path, tmp_path: Path) -> None:
    wide = load(str(tiny_folder(tmp_path / "wide", vocab=300)), "fp32", "cpu")
    for kind in KINDS:
        assert formats.attempt(learned / kind, wide.target.info, lambda: refuse("wide")) is None


def test_a_target_that_says_nothing(model: LoadedModel) -> None:
    every = frozenset(range(model.target.info.vocab_size))
    silent = LoadedModel(model.name, model.target, model.tokenizer, every)
    with pytest.raises(ConfigError, match="ends its answers at once"):
        speak(silent)
