"""What a published config, or the metadata of a GGUF file, says about a decoder.

Anything that our decoder would silently compute differently is a `ModelError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from forerun.errors import ModelError
from forerun.models.architecture import DecoderConfig
from forerun.models.foreign import reason
from forerun.models.gguf_file import GGUFFile
from forerun.models.rope import NEEDED
from forerun.models.weights import ROPE_FACTORS

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_OWN = "fetch the model's own config.json"
_GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees everything
_GEMMA_LOCAL_THETA = 10_000.0

Config = Mapping[str, Any]


def text_config(config: Config) -> Config:
    """The language model's part of a config: Gemma 3 with vision nests it."""
    if config.get("model_type") == "gemma3":
        return {"model_type": "gemma3_text", **_object(config, "text_config")}
    return config


def decoder_config(published: Config) -> DecoderConfig:
    """From the content of a config.json, in the spelling of transformers 4 or 5.

    Raises `ModelError` when it lacks a number or asks for something our decoder does not compute.
    """
    config = text_config(published)
    architecture = config.get("model_type", "")
    assert architecture in ARCHITECTURES, architecture
    _refuse_unknown_features(config)
    if architecture == "gemma3_text":
        config = _GEMMA_DEFAULTS | dict(config)
    try:
        return _decoder_config(architecture, config)
    except KeyError as error:
        raise ModelError(f"config.json lacks {error}; {_OWN}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the config makes no sense ({reason(error)}); {_OWN}") from None


def _whole(config: Config, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the config has {name} {value!r}, not a whole number above 0; {_OWN}")
    return value


def _number(config: Config, name: str) -> float:
    value = config[name]
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"the config has {name} {value!r}, not a number above 0; {_OWN}")
    return float(value)


def _object(config: Config, name: str) -> Config:
    """An object inside the config; empty where it is absent."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"the config has {name} {value!r}, not an object; {_OWN}")
    return value


def _decoder_config(architecture: str, config: Config) -> DecoderConfig:
    gemma = architecture == "gemma3_text"
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    bias = bool(config.get("attention_bias"))
    sliding = _sliding_layers(architecture, config)
    rope, local = _rope(config)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        layers=_whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole({"num_key_value_heads": heads} | _given(config), "num_key_value_heads"),
        head_dim=_whole({"head_dim": hidden // heads} | _given(config), "head_dim"),
        max_length=_whole(config, "max_position_embeddings"),
        norm_eps=_number(config, "rms_norm_eps"),
        rope_theta=_number(rope, "rope_theta"),
        rope_scaling=_scaling(rope, config),
        rope_local_theta=_number(local, "rope_theta") if local else None,
        sliding_window=_whole(config, "sliding_window") if any(sliding) else None,
        sliding_layers=sliding if any(sliding) else (),
        tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        qkv_bias=bias or architecture == "qwen2",
        o_bias=bias and architecture != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=_number(config, "query_pre_attn_scalar") ** -0.5 if gemma else 0.0,
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
    )


def _given(config: Config) -> dict[str, Any]:
    """Without what is null."""
    return {name: value for name, value in config.items() if value is not None}


# Published configs of Gemma 3 leave out what equals transformers' defaults.
_GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _refuse_unknown_features(config: Config) -> None:
    architecture = config["model_type"]
    gemma = architecture == "gemma3_text"
    expected = "gelu_pytorch_tanh" if gemma else "silu"
    activation = config.get("hidden_activation" if gemma else "hidden_act", expected)
    if activation != expected:
        raise ModelError(
            f"this {architecture} uses the activation '{activation}', our decoder {expected}; "
            "take a model of the usual shape"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"the weights are quantised with {method}, which is not read; take the unquantised "
            "checkpoint or a GGUF file of this model"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError("this model attends in both directions; take a causal language model")


def _sliding_layers(architecture: str, config: Config) -> tuple[bool, ...]:
    layers = range(_whole(config, "num_hidden_layers"))
    if kinds := config.get("layer_types"):
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"this model has layers of type '{unknown.pop()}', our decoder only full and "
                "sliding attention; take another model"
            )
        if len(kinds) != len(layers):
            raise ModelError(
                f"the config has {len(kinds)} layer_types for {len(layers)} layers; {_OWN}"
            )
        return tuple(kind == "sliding_attention" for kind in kinds)
    if architecture == "mistral":
        return tuple(config.get("sliding_window") is not None for _ in layers)
    if architecture in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        return tuple(layer >= config.get("max_window_layers", 28) for layer in layers)
    if architecture == "gemma3_text":
        return _gemma_layers(len(layers), config.get("sliding_window_pattern", _GEMMA_PATTERN))
    return ()


def _gemma_layers(layers: int, pattern: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))


def _rope(config: Config) -> tuple[Config, Config | None]:
    """The rotary parameters of full layers, and of sliding ones where they have their own."""
    gemma = config["model_type"] == "gemma3_text"
    theta = config.get("rope_theta", 1e6 if gemma else 1e4)
    local = {"rope_theta": config.get("rope_local_base_freq", _GEMMA_LOCAL_THETA)}
    rope = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    if "full_attention" in rope:
        local = rope.get("sliding_attention", local)
        rope = _object(rope, "full_attention")
    kind = local.get("rope_type", "default")
    if gemma and kind != "default":
        raise ModelError(
            f"rope type '{kind}' in sliding layers is not computed; take another model"
        )
    return {"rope_theta": theta, **rope}, local if gemma else None


def _scaling(rope: Config, config: Config) -> dict[str, Any] | None:
    """The published scaling with `rope_type` and the original length always there; None: none."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("this model rotates a part of each head only; take another model")
    if kind == "dynamic":
        # Changes nothing up to max_position_embeddings, and nothing longer is run.
        kind = "default"
    if kind not in NEEDED:
        raise ModelError(
            f"rope type '{kind}' is not computed by our decoder (only {', '.join(NEEDED)}); "
            "take another model"
        )
    if kind == "default":
        return None
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type") and v is not None}
    scaling["rope_type"] = kind
    original = "original_max_position_embeddings"
    scaling.setdefault(original, config.get(original) or config["max_position_embeddings"])
    for name in (original, *NEEDED[kind]):
        if name not in scaling:
            raise ModelError(f"rope type '{kind}' needs '{name}', which the config lacks; {_OWN}")
        _number(scaling, name)
    return scaling


# GGUF -------------------------------------------------------------------------------------------

_GGUF_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
_GGUF_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_GEMMA_27B_LAYERS = 62  # scales attention by hidden / heads; the file does not say so


def gguf_config(file: GGUFFile) -> DecoderConfig:
    """From the metadata of a GGUF file.

    Raises `ModelError` for architectures and rope types that our decoder does not compute.
    """
    return decoder_config(gguf_published(file))


def gguf_published(file: GGUFFile) -> dict[str, Any]:
    """The config.json that a GGUF file was made from, as far as our decoder needs it.

    Raises `ModelError` for architectures that are not known here.
    """
    name = file.metadata.get("general.architecture", "")
    if name not in _GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF files of architecture '{name}' are not read (only "
            f"{', '.join(_GGUF_ARCHITECTURES)}); take the folder of safetensors of this model"
        )
    try:
        return _published(file, name)
    except KeyError as error:
        raise ModelError(f"{file.path} lacks the metadata {error}; convert it anew") from None


def _published(file: GGUFFile, name: str) -> dict[str, Any]:
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    architecture = _GGUF_ARCHITECTURES[name]
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", hidden // heads)
    if own.get("expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts; take a dense model")
    if own.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path} rotates a part of each head only; take another model")
    config = {
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own.get("rope.freq_base", 1e4),
        "rope_scaling": _gguf_scaling(file, own, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if architecture == "gemma3_text":
        large = own["block_count"] == _GEMMA_27B_LAYERS
        config |= {
            "sliding_window": own["attention.sliding_window"],
            "query_pre_attn_scalar": hidden // heads if large else head_dim,
            "final_logit_softcapping": own.get("final_logit_softcapping"),
            "rope_theta": own.get("rope.freq_base", 1e6),
        }
    return config


def _gguf_scaling(file: GGUFFile, own: Config, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, own, head_dim)
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    prefix = "rope.scaling."
    given = {key.removeprefix(prefix) for key in own if key.startswith(prefix)}
    if unknown := given - _GGUF_SCALING.keys() - {"finetuned"}:
        raise ModelError(
            f"{file.path} scales its rotary frequencies with '{unknown.pop()}', which is not known "
            "here; take the folder of safetensors of this model"
        )
    return {name: own[prefix + key] for key, name in _GGUF_SCALING.items() if key in given}


def _llama3_scaling(file: GGUFFile, own: Config, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds what each frequency is divided by, not the rule.

    All published ones differ in `factor` alone, which is the largest divisor. That guess is
    checked against the divisors.
    """
    divisors = file.read(ROPE_FACTORS, torch.float32)
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = own.get("rope.freq_base", 1e4)
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    smooth = ((8192 / wavelengths - 1) / (4 - 1)).clamp(0, 1)
    expected = 1 / (smooth + (1 - smooth) / scaling["factor"])
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{file.path} scales its rotary frequencies by a rule that is not known here; take the "
            "folder of safetensors of this model"
        )
    return scaling
