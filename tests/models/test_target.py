"""What a target lends to drafters: its embedding, its final norm, its head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes import FakeTarget, random_rule
from forerun.errors import ConfigError
from forerun.models import kernels
from forerun.models.decoder import Decoder
from forerun.models.hub import load
from forerun.models.target import Segment, opened
from tiny import tiny_folder

TOKENS = [3, 14, 15, 92, 65]


@pytest.fixture(params=["compiled", "plain"])
def decoder(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Decoder:
    if request.param == "plain":
        monkeypatch.setattr(kernels, "library", lambda: None)
    target = load(str(tiny_folder(tmp_path, layers=4)), dtype="float32", device="cpu").target
    assert isinstance(target, Decoder)
    return target


def test_the_ends_are_those_of_a_pass(decoder: Decoder) -> None:
    store = decoder.new_store(16)
    span = store.open()
    store.reserve(span, len(TOKENS))
    result = decoder.forward([Segment(span, TOKENS)], store, taps=(0, decoder.info.layers))
    assert result.taps_RTD is not None
    embedded, last = result.taps_RTD.unbind(1)
    assert torch.equal(decoder.embed(torch.tensor(TOKENS)), embedded)
    normed = decoder.final_norm(last)
    logits = decoder.head_logits(normed)
    torch.testing.assert_close(logits, result.logits_NV, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(decoder.head_logits(last), logits, atol=1e-2), "the norm matters"


def test_states_are_those_at_the_boundaries_that_were_asked_for(decoder: Decoder) -> None:
    layers = decoder.info.layers

    def states(run: list[int] | None, taps: list[int]) -> list[torch.Tensor]:
        store = decoder.new_store(16)
        span = store.open()
        store.reserve(span, len(TOKENS))
        result = decoder.forward([Segment(span, TOKENS)], store, taps, run)
        assert result.taps_RTD is not None
        return [*result.taps_RTD.unbind(1), result.logits_NV]

    every = states(None, list(range(layers + 1)))
    for boundary, state in enumerate(every[:-2]):
        assert not torch.equal(state, every[boundary + 1]), "they differ"
    *some, logits = states(None, [layers, 1])
    assert all(map(torch.equal, some, (every[layers], every[1])))
    assert torch.equal(logits, every[-1])
    # where layers are left out, boundaries keep their names
    kept = [0, *range(2, layers)]
    first, second, third, last, _ = states(kept, [0, 1, 2, layers])
    assert torch.equal(first, every[0])
    assert torch.equal(second, every[1])
    assert torch.equal(third, every[1])
    assert not torch.equal(last, every[layers])


def test_a_target_that_lends_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="medusa draft reads inside the model"):
        opened(FakeTarget(random_rule()), "medusa")
