from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.models.hub import LoadedModel
from forerun.models.target import Segment
from forerun.train.capture import Capture, States
from training import target, texts

TAPS = (1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return target(tmp_path_factory.mktemp("target"))


def test_a_batch_is_what_the_target_computes(model: LoadedModel) -> None:
    batch = Capture(model.target, TAPS)(texts())
    assert batch.lengths_B.tolist() == [12, 14, 17, 7]
    for b, example in enumerate(texts()):
        length = len(example.tokens)
        store = model.target.new_store(64)
        span = store.open()
        store.reserve(span, length)
        alone = model.target.forward([Segment(span, example.tokens)], store, TAPS)
        assert batch.tokens_BR[b, :length].tolist() == example.tokens
        assert batch.supervised_BR[b, :length].tolist() == example.supervised
        assert torch.allclose(batch.taps_BRTC[b, :length], alone.taps_RTD, atol=1e-5)
        logits_RV = model.target.head_logits(batch.final_BRC[b, :length])
        assert torch.allclose(logits_RV, alone.logits_NV, atol=1e-4)
        assert not batch.supervised_BR[b, length:].any()


def test_states_are_run_once_and_found_again(model: LoadedModel, tmp_path: Path) -> None:
    examples = texts()
    info = model.target.info
    kept = States(tmp_path / "states.bin", examples, len(TAPS) + 1, info)
    capture = Capture(model.target, TAPS, kept)
    first = capture(examples[:2])
    assert [example in kept for example in examples] == [True, True, False, False]
    mixed = capture(examples[1:])
    fresh = Capture(model.target, TAPS)(examples[1:])
    assert torch.allclose(mixed.taps_BRTC, fresh.taps_BRTC, atol=1e-5)
    assert torch.equal(mixed.taps_BRTC[0, :14], first.taps_BRTC[1, :14])
    size = (tmp_path / "states.bin").stat().st_size
    assert size == States.bytes(examples, len(TAPS) + 1, info) == 50 * 3 * 32 * 4
