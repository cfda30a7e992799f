"""DecoderConfig from published configs in both spellings, and from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import tiny_gguf
from forerun.errors import ModelError
from forerun.models.architecture import DecoderConfig
from forerun.models.configs import decoder_config, gguf_config
from forerun.models.gguf_file import GGUFFile

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA: dict[str, Any] = SMALL | {"model_type": "llama", "rms_norm_eps": 1e-6}


def read(config: Any) -> DecoderConfig:
    return decoder_config(config.to_dict())


def test_the_plain_numbers() -> None:
    found = read(LlamaConfig(**SMALL, rms_norm_eps=1e-6))
    assert found == DecoderConfig(
        architecture="llama",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        layers=8,
        heads=4,
        kv_heads=2,
        head_dim=8,
        max_length=128,
        norm_eps=1e-6,
        rope_theta=10_000.0,
    )


def test_biases_of_each_family() -> None:
    def biases(config: Any) -> tuple[bool, bool, bool]:
        found = read(config)
        return found.qkv_bias, found.o_bias, found.mlp_bias

    assert biases(LlamaConfig(**SMALL)) == (False, False, False)
    assert biases(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(Qwen2Config(**SMALL)) == (True, False, False)
    assert biases(Qwen3Config(**SMALL)) == (False, False, False)
    assert biases(Qwen3Config(**SMALL, attention_bias=True)) == (True, True, False)


def test_sliding_layers_of_each_family() -> None:
    assert read(MistralConfig(**SMALL, sliding_window=16)).sliding_layers == (True,) * 8
    assert read(MistralConfig(**SMALL, sliding_window=None)).sliding_layers == ()
    some = read(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=6)
    )
    assert some.sliding_layers == (False,) * 6 + (True,) * 2
    assert some.sliding_window == 16
    assert read(Qwen2Config(**SMALL, sliding_window=16)).sliding_layers == ()
    gemma = read(Gemma3TextConfig(**SMALL))
    assert gemma.sliding_layers == (True,) * 5 + (False,) + (True,) * 2


def test_gemma() -> None:
    found = read(Gemma3TextConfig(**SMALL, head_dim=8, query_pre_attn_scalar=64))
    assert found.architecture == "gemma3_text"
    assert (found.rope_theta, found.rope_local_theta) == (1e6, 1e4)
    assert found.attention_scale == 64**-0.5
    assert found.embedding_scale == 32**0.5
    assert found.norm_offset == 1
    assert found.tied_embeddings
    assert found.qk_norm
    assert found.sandwich_norms
    assert found.activation == "gelu_tanh"


def test_the_old_spelling_says_the_same() -> None:
    """transformers 4 wrote rope_theta and rope_scaling, and Gemma's layers as a pattern."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    assert decoder_config(new) == decoder_config(old) == decoder_config(older)
    assert decoder_config(new).rope_scaling == {"rope_type": "llama3", **scaling}

    gemma = {**Gemma3TextConfig(**SMALL).to_dict()}
    expected = decoder_config(gemma)
    del gemma["layer_types"], gemma["rope_parameters"]
    gemma |= {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert decoder_config(gemma) == expected


def test_gemma_with_vision_is_its_text_part() -> None:
    text = Gemma3TextConfig(**SMALL).to_dict()
    assert decoder_config({"model_type": "gemma3", "text_config": text}) == decoder_config(text)


def test_scaling_of_gemma_is_for_its_full_layers() -> None:
    text = Gemma3TextConfig(**SMALL).to_dict()
    text["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    found = decoder_config(text)
    assert found.rope_scaling is not None
    assert (found.rope_scaling["rope_type"], found.rope_scaling["factor"]) == ("linear", 8.0)


def test_dynamic_scaling_changes_nothing_within_the_length() -> None:
    config = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert decoder_config(config) == decoder_config(LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not computed"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope type 'su'"),
        ({"partial_rotary_factor": 0.5}, "rotates a part of each head"),
        ({"hidden_act": "relu"}, "uses the activation 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"layer_types": ["linear_attention"] * 8}, "layers of type 'linear_attention'"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"quantization_config": "gptq"}, "quantised with gptq"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers '4', not a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads None, not a whole number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads '2', not a whole number"),
        ({"head_dim": True}, "head_dim True, not a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0, not a whole number"),
        ({"max_position_embeddings": -5}, "max_position_embeddings -5, not a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small', not a number"),
        ({"rope_parameters": "yes"}, "rope_parameters 'yes', not an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0, not a number above 0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "rope type 'llama3' needs 'low_freq_factor'",
        ),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 8 layers"),
        ({"layer_types": 3}, "makes no sense"),
        ({"model_type": "gemma3", "text_config": "x"}, "text_config 'x', not an object"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    decoder_config(LLAMA)
    with pytest.raises(ModelError, match=message) as caught:
        decoder_config(LLAMA | change)
    assert "\n" not in str(caught.value)


def test_null_is_as_absent_where_there_is_a_default() -> None:
    absent = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert decoder_config(absent | {"num_key_value_heads": None}) == decoder_config(absent)
    assert decoder_config(LLAMA | {"head_dim": None}) == decoder_config(LLAMA)


def test_a_missing_number_is_named() -> None:
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        decoder_config({k: v for k, v in LLAMA.items() if k != "hidden_size"})


# GGUF -------------------------------------------------------------------------------------------


def gguf_file(
    folder: Path, architecture: str = "llama", tensors: Any = None, **extra: Any
) -> GGUFFile:
    state = tiny_gguf.random_state(architecture if architecture == "gemma3" else "llama")
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in extra.items()}
    path = folder / "m.gguf"
    tiny_gguf.write_gguf(path, state, architecture, extra=named, extra_tensors=tensors)
    return GGUFFile(path)


def test_gguf_numbers(tmp_path: Path) -> None:
    found = gguf_config(gguf_file(tmp_path))
    assert found.norm_eps == pytest.approx(1e-5)
    expected = LlamaConfig(
        vocab_size=tiny_gguf.VOCAB,
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.INNER,
        num_hidden_layers=tiny_gguf.LAYERS,
        num_attention_heads=tiny_gguf.HEADS,
        num_key_value_heads=tiny_gguf.KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=found.norm_eps,
        tie_word_embeddings=True,
    )
    assert found == read(expected)


def test_gguf_gemma(tmp_path: Path) -> None:
    found = gguf_config(gguf_file(tmp_path, "gemma3", rope__freq_base=1e6))
    expected = Gemma3TextConfig(
        vocab_size=tiny_gguf.VOCAB,
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.INNER,
        num_hidden_layers=tiny_gguf.LAYERS,
        num_attention_heads=tiny_gguf.HEADS,
        num_key_value_heads=tiny_gguf.KV_HEADS,
        head_dim=tiny_gguf.HEAD_DIM,
        query_pre_attn_scalar=tiny_gguf.HEAD_DIM,
        max_position_embeddings=256,
        rms_norm_eps=found.norm_eps,
        sliding_window=8,
    )
    assert found == read(expected)


def test_gguf_yarn(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    named = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    found = gguf_config(gguf_file(tmp_path, **named))
    assert found.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def llama3_divisors(factor: float, original: int) -> torch.Tensor:
    """What llama.cpp's converter writes for rope type llama3 (low 1, high 4), frequency by
    frequency."""
    divisors = []
    for i in range(0, tiny_gguf.HEAD_DIM, 2):
        wave = 2 * torch.pi * 10_000.0 ** (i / tiny_gguf.HEAD_DIM)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original:
            divisors.append(factor)
        else:
            smooth = (original / wave - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors(32.0, 8192)
    assert divisors[-1] > 1, "the test has a stretched frequency"
    file = gguf_file(tmp_path, tensors={"rope_freqs.weight": divisors})
    assert gguf_config(file).rope_scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(32.0, 8192) + torch.tensor([0, 0, 0, 1.0, 0, 0, 0, 0])
    with pytest.raises(ModelError, match="by a rule that is not known"):
        gguf_config(gguf_file(tmp_path, tensors={"rope_freqs.weight": divisors}))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "rope type 'longrope'"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1},
            "yarn_log_multiplier",
        ),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 8}, "rotates a part of each head"),
    ],
)
def test_gguf_features_that_are_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_config(gguf_file(tmp_path, **extra))


def test_other_gguf_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture 'starcoder2' are not read"):
        gguf_config(gguf_file(tmp_path, "starcoder2"))
