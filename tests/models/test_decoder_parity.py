"""The decoder against transformers, number by number: every family, and the packaged models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from forerun.models import packaged
from forerun.models.decoder import Decoder
from forerun.models.hub import LoadedModel, load
from forerun.models.target import Segment

SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FULL_AND_SLIDING = {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 1e4}}


def rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": parameters}


QWEN2 = {k: v for k, v in SMALL.items() if k != "head_dim"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, theta": ("llama", rope({"rope_type": "default", "rope_theta": 5e5})),
    "llama, linear": ("llama", rope(LINEAR)),
    "llama, dynamic": ("llama", rope({**LINEAR, "rope_type": "dynamic"})),
    "llama, llama3": ("llama", rope(LLAMA3)),
    "llama, yarn": ("llama", rope(YARN)),
    "llama, yarn's options": (
        "llama",
        rope(YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}),
    ),
    "mistral, sliding": ("mistral", {"sliding_window": 8}),
    "mistral, full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2, sliding above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biased and tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    ),
    "gemma3, stretched": (
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 40, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | rope(FULL_AND_SLIDING),
    ),
    "gemma3, soft-capped": (
        "gemma3_text",
        {"sliding_window": 8, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    ),
}
TOKENS = [(37 * i * i + 11 * i) % tiny.VOCAB for i in range(40)]


def published(kind: str, changes: dict[str, Any]) -> Any:
    """A random model of transformers, its norms and biases random, too."""
    settings = {key: value for key, value in (SMALL | changes).items() if value is not None}
    settings |= {key: None for key in ("sliding_window",) if changes.get(key, 0) is None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.5 if "embed" in name else 0.2
            centre = 1.0 if "norm" in name and not kind.startswith("gemma") else 0.0
            parameter.normal_(centre, spread)
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, Any]:
    kind, changes = CASES[request.param]
    folder = tiny.tiny_folder(tmp_path_factory.mktemp("model"))  # for its tokenizer
    theirs = published(kind, changes)
    theirs.save_pretrained(folder)
    ours = load(str(folder), "float32", "cpu").target
    assert isinstance(ours, Decoder)
    return ours, theirs


@torch.no_grad()
def expected(model: Any, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and what each layer gives; the last from a hook, for transformers norms it."""
    last: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *args: last.append(args[2]))
    output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hook.remove()
    end = last[0][0] if isinstance(last[0], tuple) else last[0]
    states = [*output.hidden_states[:-1], end.reshape(1, len(tokens), -1)]
    return output.logits[0], [state[0] for state in states]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_logits_and_taps(pair: tuple[Decoder, Any]) -> None:
    ours, theirs = pair
    logits, states = expected(theirs, TOKENS)
    assert logits.std() > 0.3, "the test is not blind"
    store = ours.new_store(128)
    span = store.open()
    store.reserve(span, len(TOKENS))
    found = ours.forward([Segment(span, TOKENS)], store, taps=range(ours.info.layers + 1))
    close(found.logits_NV, logits)
    assert found.taps_RTD is not None
    for boundary, state in enumerate(states):
        close(found.taps_RTD[:, boundary], state)


def test_chunks_and_trees(pair: tuple[Decoder, Any]) -> None:
    """A prefix in chunks, then a tree across the edge of the windows, beside another sequence."""
    ours, theirs = pair
    store = ours.new_store(512)
    beside, span = store.open(), store.open()
    for begin, end in ((0, 1), (1, 10), (10, 27)):
        store.reserve(span, end - begin)
        ours.forward([Segment(span, TOKENS[begin:end])], store)
        store.commit(span, range(end - begin))
    tree, parents = [3, 4, 5, 6, 7], [-1, 0, 0, 2, -1]
    store.reserve(span, len(tree))
    store.reserve(beside, 3)
    rows = ours.forward([Segment(beside, [9, 8, 7]), Segment(span, tree, parents)], store)
    close(rows.logits_NV[:3], expected(theirs, [9, 8, 7])[0])
    for row, path in ((1, [3, 4]), (3, [3, 5, 6]), (4, [7])):
        close(rows.logits_NV[3 + row], expected(theirs, TOKENS[:27] + path)[0][-1])


# The packaged models ----------------------------------------------------------------------------


def real(name: str) -> tuple[LoadedModel, Any]:
    path: Path | None = packaged.path(name)
    if path is None:
        pytest.skip(f"{name} is not pulled")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    if name == "gemma3-270m" and not os.environ.get("FORERUN_SLOW_TESTS"):
        pytest.skip("transformers needs half a minute to read it; set FORERUN_SLOW_TESTS=1")
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return load(name, "float32", "cpu"), theirs.eval()


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_packaged_models(name: str) -> None:
    ours, theirs = real(name)
    text = "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the moon."
    tokens = ours.tokenizer.encode(text)
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    store = ours.target.new_store(256)
    span = store.open()
    store.reserve(span, len(tokens))
    found = ours.target.forward([Segment(span, tokens)], store).logits_NV
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
