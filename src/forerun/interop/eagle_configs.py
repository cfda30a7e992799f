"""What the published configs of EAGLE drafts say, in and out.

    flat         a Llama config with a few keys more: SafeAILab, SpecForge, SGLang, vLLM, ModelOpt
    speculators  speculators_model_type eagle3, the layer in `transformer_layer_config`

The taps of EAGLE-3 are stored as boundaries (boundary b is the input of layer b). Who writes what:

    eagle_aux_hidden_state_layer_ids               boundaries: speculators, vLLM
    eagle_config.eagle_aux_hidden_state_layer_ids  SpecForge: layers whose output is read, so one
                                                   less; SGLang reads them so if the first is 1,
                                                   otherwise as boundaries, as vLLM always does
    neither                                        2, N // 2, N - 3 of N layers

Nested ids are read as SGLang reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, ConfigError
from forerun.interop.layer_numbers import layer_numbers
from forerun.models.configs import decoder_config
from forerun.models.heads.eagle import Eagle1Settings, Eagle3Settings, EagleSettings
from forerun.models.weights import Weights

Config = Mapping[str, Any]

TAPS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Nested configs leave out what equals the defaults of transformers' LlamaConfig and Qwen3Config,
# flat ones the number of positions (Vicuna-33B).
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
    },
}
FLAT_DEFAULTS = {key: DEFAULTS["llama"][key] for key in ("max_position_embeddings", "rms_norm_eps")}


def is_speculators(config: Config) -> bool:
    """Whether a config.json is in speculators' layout."""
    return "speculators_model_type" in config


def layer_config(config: Config) -> Config:
    """The part that describes the decoder layer."""
    if is_speculators(config):
        nested: Config = config.get("transformer_layer_config", {})
        return nested
    return config


def eagle1_settings(config: Config, weights: Weights, folder: Path) -> Eagle1Settings:
    """EAGLE-1 and 2 are flat. Whether fc has a bias, the tensors say where the config does not."""
    return Eagle1Settings(
        **_layer_numbers(config, weights, folder),
        fc_bias=config.get("bias") is True or "fc.bias" in weights,
    )


def eagle3_settings(config: Config, weights: Weights, folder: Path) -> Eagle3Settings:
    """Norms that no flag mentions are known by their tensors."""
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(
            f"{folder} is a draft of type '{kind}', which is not computed here; take plain EAGLE-3"
        )
    numbers = _layer_numbers(config, weights, folder)
    target_hidden_size = config.get("target_hidden_size") or numbers["hidden_size"]
    count = _tap_count(weights, target_hidden_size, folder)
    if _nested(config).get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{folder} reads the target's last state alone (use_aux_hidden_state is false), which "
            "is not drafted with here; take an EAGLE-3 draft with taps"
        )
    own_head = "lm_head.weight" in weights
    return Eagle3Settings(
        **numbers,
        target_hidden_size=target_hidden_size,
        taps=_taps(config, count),
        tap_count=count,
        draft_vocab_size=_draft_vocab_size(config, numbers["vocab_size"]),
        own_head=own_head,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=_norm(config, "norm_before_fc", "input_norm.weight", weights),
        fc_norm=_norm(config, "fc_norm", "fc_norm.0.weight", weights),
        norm_output=bool(config.get("norm_output")),
    )


def _layer_numbers(config: Config, weights: Weights, folder: Path) -> dict[str, Any]:
    """The numbers of the layers, from a config in the spelling of transformers 4 or 5."""
    given = {key: value for key, value in layer_config(config).items() if value is not None}
    if is_speculators(config):
        kind = given.get("model_type", "qwen3")
        if kind not in DEFAULTS:
            raise CheckpointError(
                f"{folder} drafts with a layer of type '{kind}', which is not computed here (only "
                f"{', '.join(DEFAULTS)}); take another draft"
            )
        given = DEFAULTS[kind] | given
    else:
        given = FLAT_DEFAULTS | given
    numbers = decoder_config(given | {"model_type": "llama"})
    sliding = set(numbers.sliding_layers[: numbers.layers])
    if len(sliding) > 1:
        raise CheckpointError(
            f"{folder} mixes full and sliding attention, which is not computed here; "
            "take another draft"
        )
    attention = "layers.0.self_attn."
    biased = numbers.qkv_bias or f"{attention}q_proj.bias" in weights
    o_biased = numbers.o_bias or f"{attention}o_proj.bias" in weights
    return {
        **layer_numbers(numbers),
        "sliding_window": numbers.sliding_window,
        "attention_bias": biased,
        "o_bias": None if o_biased == biased else o_biased,
        "mlp_bias": numbers.mlp_bias,
        "qk_norm": f"{attention}q_norm.weight" in weights,
        "own_embedding": "embed_tokens.weight" in weights,
    }


def _tap_count(weights: Weights, target_hidden_size: int, folder: Path) -> int:
    entry = weights.entries.get("fc.weight")
    if entry is None:
        raise CheckpointError(f"{folder} has no fc.weight, which joins the taps; fetch it again")
    count, rest = divmod(entry.shape[-1], target_hidden_size)
    if rest or not count:
        raise CheckpointError(
            f"{folder}: fc.weight reads {entry.shape[-1]} numbers a token, which is no multiple of "
            f"the target's width {target_hidden_size}; set target_hidden_size in config.json"
        )
    return count


def _nested(config: Config) -> Config:
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError("eagle_config is no object")
    return nested


def _taps(config: Config, count: int) -> tuple[int, ...] | None:
    """The boundaries to read. A list may end with the target's last, which only labels."""
    boundaries = config.get(TAPS)
    nested = _nested(config).get(TAPS)
    if boundaries is None and nested:
        boundaries = [layer + 1 for layer in nested] if nested[0] == 1 else nested
    if not boundaries:
        return None
    return tuple(boundaries[:count]) if len(boundaries) == count + 1 else tuple(boundaries)


def _draft_vocab_size(config: Config, vocab_size: int) -> int:
    default = 32_000 if is_speculators(config) else vocab_size
    return config.get("draft_vocab_size") or default


def _norm(config: Config, flag: str, tensor: str, weights: Weights) -> bool:
    stated = _nested(config).get(flag, config.get(flag))
    return tensor in weights if stated is None else bool(stated)


# ---- writing ------------------------------------------------------------------------------------


def flat_config(settings: EagleSettings, layout: str) -> dict[str, Any]:
    """For everybody but speculators. Raises `ConfigError` where it cannot be expressed."""
    if settings.qk_norm:
        raise ConfigError(f"{layout} knows no EAGLE layer with q and k norms; take speculators")
    if settings.sliding_window:
        raise ConfigError(f"{layout} knows no EAGLE layer with a window; take speculators")
    if settings.layers > 1 and layout != "vllm":
        raise ConfigError(f"{layout} runs EAGLE drafts of one layer; export it as vllm")
    base = {
        "model_type": "llama",
        **_layer_keys(settings),
        "rope_theta": settings.rope_theta,
        "rope_scaling": settings.rope_scaling,
        "hidden_act": "silu",
    }
    if isinstance(settings, Eagle3Settings):
        return base | _flat_eagle3(settings, layout)
    assert isinstance(settings, Eagle1Settings)
    architecture = "LlamaForCausalLMEagle" if layout == "sglang" else "LlamaForCausalLM"
    return base | {"architectures": [architecture], "bias": settings.fc_bias}


def _flat_eagle3(settings: Eagle3Settings, layout: str) -> dict[str, Any]:
    c = settings
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size if c.own_head else None,
        **{flag: getattr(c, flag) for flag in FLAGS},
    }
    if c.target_hidden_size != c.hidden_size:
        written["target_hidden_size"] = c.target_hidden_size
    if layout == "safeailab":
        if c.taps or any(getattr(c, flag) for flag in FLAGS):
            raise ConfigError(
                "safeailab computes neither norm flags nor taps of one's own; export it as vllm"
            )
        return written
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if c.tap_count != 3:
        written["num_aux_hidden_states"] = c.tap_count
    if c.taps:
        written[TAPS] = list(c.taps)
        if layout != "vllm":
            nested[TAPS] = _nested_ids(c.taps, layout)
    return written | {"eagle_config": nested}


def _nested_ids(taps: tuple[int, ...], layout: str) -> list[int]:
    """Layer ids as the reader takes them; see the table above."""
    if layout == "specforge" or taps[0] == 2:
        return [boundary - 1 for boundary in taps]
    if taps[0] == 1:
        raise ConfigError(
            "sglang cannot be told to read boundary 1 first; export it as vllm or specforge"
        )
    return list(taps)


def speculators_config(settings: EagleSettings, target: str) -> dict[str, Any]:
    """For speculators, and for vLLM, which reads it too."""
    if not isinstance(settings, Eagle3Settings) or not settings.own_head:
        raise ConfigError(
            "speculators knows EAGLE-3 drafts with their own output matrix alone; export it as vllm"
        )
    c = settings
    layer: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        **_layer_keys(c),
        "rope_parameters": {
            "rope_type": "default",
            **(c.rope_scaling or {}),
            "rope_theta": c.rope_theta,
        },
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
    }
    if c.sliding_window:
        layer["sliding_window"] = c.sliding_window
        layer["layer_types"] = ["sliding_attention"] * c.layers
        layer["use_sliding_window"] = True
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": c.draft_vocab_size,
        **{flag: getattr(c, flag) for flag in FLAGS},
        "target_hidden_size": c.target_hidden_size,
        TAPS: list(c.taps) if c.taps else None,
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
    }


def _layer_keys(settings: EagleSettings) -> dict[str, Any]:
    c = settings
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_eps,
        # Where the output projection has none, the tensors tell.
        "attention_bias": c.attention_bias and c.o_bias is not False,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": False,
    }
