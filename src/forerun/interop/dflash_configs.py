"""What the published configs of DFlash drafts say, in and out.

Four layouts, told apart by their marks. All describe layers of the Qwen3 kind, whatever the target.

    z-lab        architectures [DFlashDraftModel], `dflash_config`; SpecForge, vLLM and SGLang, too
    DeepSpec     architectures [Qwen3DSparkModel], the same keys flat; without a Markov head
    speculators  speculators_model_type dflash, the layers in `transformer_layer_config`

Which slots draft (see `models.heads.dflash`), the first of these that a config answers:
`sample_from_anchor`, then `dspark_bonus_anchor: true` (in place), then the layout: DeepSpec is
anchor first, the others in place.

Layer ids: `target_layer_ids` and `dspark_target_layer_ids` name layers whose output is read,
`aux_hidden_state_layer_ids` and `eagle_aux_hidden_state_layer_ids` layers whose input is read; the
latter are boundaries as we count them, the former one less.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, ConfigError
from forerun.interop.layer_numbers import layer_numbers
from forerun.models.configs import decoder_config
from forerun.models.heads.dflash import DFlashConfig, LayerAttention, default_taps

Config = Mapping[str, Any]

DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel")
ZLAB = "DFlashDraftModel"
SPECULATORS = "dflash"
# Relatives that share the name or the keys, and what they add.
RELATIVES = {
    "DFlash2DraftModel": "convolutions and a candidate selector (DFlash2)",
    "LiLiCorrDraftModel": "a lattice corrector (LiLiCorr)",
    "Gemma4DSparkModel": "layers of the Gemma 4 kind",
}
# Configs leave out what equals the defaults of transformers' Qwen3Config.
QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
# What may stand in `dflash_config`. Anything else that is set could change what is computed.
KNOWN = {
    "target_layer_ids",
    "mask_token_id",
    "mask_token",
    "block_size",
    "causal",
    "causal_head",
    "use_swa",
    "swa_window_size",
    "sample_from_anchor",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "num_anchors",
}
HARMLESS = {"projector_type": "dflash", "attention_mode": "gqa", "use_aux_hidden_state": True}


def is_dflash(config: Config) -> bool:
    """Whether a config.json describes a DFlash draft or one of its relatives."""
    names = set(config.get("architectures") or ())
    return (
        "dflash_config" in config
        or str(config.get("speculators_model_type")) in (SPECULATORS, "dflash2", "dspark")
        or bool(names & {ZLAB, *DEEPSPEC, *RELATIVES})
    )


def read_config(config: Config, folder: Path) -> DFlashConfig:
    """What a config.json says, own embedding and head left aside: the tensors tell.

    Raises `CheckpointError` for what would be computed differently here.
    """
    try:
        _refuse_relatives(config, folder)
        if "speculators_model_type" in config:
            return _speculators(config, folder)
        return _zlab(config, folder)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}; fetch its own config.json") from None
    except KeyError as error:
        raise CheckpointError(f"{folder}: config.json lacks {error}; fetch it again") from None


def _refuse_relatives(config: Config, folder: Path) -> None:
    more = ""
    for name in config.get("architectures") or ():
        more = more or RELATIVES.get(name, "")
    kind = config.get("speculators_model_type", SPECULATORS)
    inner = _inner(config)
    if kind != SPECULATORS:
        more = more or f"the extra parts of {kind}"
    elif config.get("markov_rank") or inner.get("markov_rank"):
        more = "a Markov head (DSpark)"
    elif config.get("projector_type", "dflash") != "dflash":
        more = f"a projector of type {config['projector_type']}"
    elif config.get("shift_label") or inner.get("shift_label") or inner.get("draft_shift"):
        more = "labels shifted by one slot"
    elif config.get("is_neox_style", config.get("rope_is_neox_style", True)) is False:
        more = "interleaved rotary positions"
    for key, value in inner.items():
        if key not in KNOWN and value not in (None, False) and HARMLESS.get(key) != value:
            more = more or f"'{key}' = {value!r} in dflash_config"
    if more:
        raise CheckpointError(f"{folder} has {more}, which is not computed here; take plain DFlash")


def _inner(config: Config) -> Config:
    return config.get("dflash_config") or {}


def _either(config: Config, name: str, default: Any = None) -> Any:
    """A value of `dflash_config`, or of the config around it."""
    value = _inner(config).get(name)
    return config.get(name, default) if value is None else value


def _zlab(config: Config, folder: Path) -> DFlashConfig:
    deepspec = any(name in DEEPSPEC for name in config.get("architectures") or ())
    taps = _zlab_taps(config)
    return DFlashConfig(
        **_layer_numbers(config),
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        target_layers=config.get("num_target_layers"),
        taps=taps,
        block_size=_either(config, "block_size", 16),
        mask_token=_mask_token(_either(config, "mask_token_id"), folder),
        anchor_first=_anchor_first(config, deepspec),
        attention=_zlab_attention(config),
        embedding_scale=_either(config, "input_embedding_scale", 1.0),
        logit_scale=_either(config, "output_multiplier", config.get("logit_scale", 1.0)),
        logit_softcap=_either(config, "final_logit_softcapping") or None,
        draft_vocab_size=config.get("draft_vocab_size"),
    )


def _speculators(config: Config, folder: Path) -> DFlashConfig:
    layers = QWEN3_DEFAULTS | dict(config["transformer_layer_config"])
    causal = not config.get("sliding_window_non_causal", False)
    kinds = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
    window = layers.get("sliding_window")
    return DFlashConfig(
        **_layer_numbers(layers),
        target_hidden_size=config.get("target_hidden_size") or layers["hidden_size"],
        taps=tuple(config["aux_hidden_state_layer_ids"]),
        block_size=config.get("block_size", 8),
        mask_token=_mask_token(config.get("mask_token_id"), folder),
        anchor_first=_anchor_first(config, False),
        attention=tuple(
            LayerAttention(window=_window(window), causal=causal)
            if kind == "sliding_attention"
            else LayerAttention()
            for kind in kinds
        ),
        window_from_anchor=True,
        draft_vocab_size=config.get("draft_vocab_size", 32_000),
    )


def _layer_numbers(config: Config) -> dict[str, Any]:
    """The numbers of the layers, from a config in the spelling of transformers 4 or 5."""
    numbers = decoder_config(QWEN3_DEFAULTS | dict(config) | {"model_type": "qwen3"})
    return {
        **layer_numbers(numbers),
        "attention_bias": numbers.qkv_bias,
    }


def _anchor_first(config: Config, by_layout: bool) -> bool:
    explicit = _either(config, "sample_from_anchor")
    if explicit is not None:
        return bool(explicit)
    return by_layout and not config.get("dspark_bonus_anchor")


def _zlab_taps(config: Config) -> tuple[int, ...]:
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    if inputs is not None:
        return tuple(inputs)
    outputs = _inner(config).get("target_layer_ids")
    if outputs is None:
        outputs = config.get("dspark_target_layer_ids", config.get("target_layer_ids"))
    if outputs is None:
        return default_taps(config["num_target_layers"], config["num_hidden_layers"])
    return tuple(layer + 1 for layer in outputs)


def _zlab_attention(config: Config) -> tuple[LayerAttention, ...]:
    """As vLLM does: `is_causal`, else `dflash_config.causal`, else the sliding layers are causal.

    `use_swa` gives windows to all layers where none is typed sliding, and makes none causal.
    """
    inner = _inner(config)
    kinds = config.get("layer_types") or []
    typed = [kind == "sliding_attention" for kind in kinds]
    layers = config["num_hidden_layers"]
    sliding = typed if any(typed) else [bool(inner.get("use_swa"))] * layers
    causal = config.get("is_causal")
    for key in ("causal", "causal_head"):
        causal = inner.get(key) if causal is None else causal
    window = inner.get("swa_window_size") or config.get("sliding_window")
    return tuple(
        LayerAttention(
            window=_window(window) if slides else 0,
            causal=(any(typed) and slides) if causal is None else causal,
        )
        for slides in sliding
    )


def _window(size: int | None) -> int:
    if not size:
        raise ConfigError("sliding layers without the size of their window")
    return size


def _mask_token(token: int | None, folder: Path) -> int:
    if token is None:
        raise CheckpointError(f"{folder}: config.json lacks mask_token_id; fetch it again")
    return token


# ---- writing ------------------------------------------------------------------------------------


def zlab_config(config: DFlashConfig) -> dict[str, Any]:
    """The config.json of the z-lab layout.

    Raises `ConfigError` where the layout has no words for what this draft does.
    """
    if config.anchor_first:
        raise ConfigError(
            "this layout drafts in place, but the draft is anchor first; export it as speculators"
        )
    _check_windows(config, from_anchor=False)
    written = _qwen3(config) | {
        "architectures": [ZLAB],
        "num_target_layers": config.target_layers or config.taps[-1],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "block_size": config.block_size,
            "sample_from_anchor": False,
        },
    }
    inner = written["dflash_config"]
    if [rule.causal for rule in config.attention] != [bool(r.window) for r in config.attention]:
        # Read by vLLM here, by the dflash package at the top.
        written["is_causal"] = inner["causal"] = _uniform_causality(config)
    if config.target_hidden_size != config.hidden_size:
        written["target_hidden_size"] = config.target_hidden_size
    if config.embedding_scale != 1:
        inner["input_embedding_scale"] = config.embedding_scale
    if config.logit_scale != 1:
        inner["output_multiplier"] = written["logit_scale"] = config.logit_scale
    if config.logit_softcap is not None:
        inner["final_logit_softcapping"] = config.logit_softcap
    if config.draft_vocab_size is not None:
        written["draft_vocab_size"] = config.draft_vocab_size
    return written


def speculators_config(config: DFlashConfig, target: str | None) -> dict[str, Any]:
    """The config.json of the speculators layout. Raises `ConfigError` as `zlab_config`."""
    windowed = {rule.causal for rule in config.attention if rule.window}
    if any(rule.causal for rule in config.attention if not rule.window) or len(windowed) > 1:
        raise ConfigError(
            "in this layout full layers see the whole block and sliding ones are all alike, but "
            "this draft has others; export it as zlab"
        )
    _check_windows(config, from_anchor=True)
    if config.embedding_scale != 1 or config.logit_scale != 1 or config.logit_softcap is not None:
        raise ConfigError("this layout scales neither embeddings nor logits; export it as zlab")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": SPECULATORS,
        "transformer_layer_config": _qwen3(config),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token,
        # vLLM applies it to full layers, too: a draft without sliding ones must say true there.
        "sliding_window_non_causal": True not in windowed,
        "sample_from_anchor": config.anchor_first,
        "speculators_config": {
            "algorithm": SPECULATORS,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.drafts},
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def _qwen3(config: DFlashConfig) -> dict[str, Any]:
    windows = {rule.window for rule in config.attention if rule.window}
    if len(windows) > 1:
        raise ConfigError("the layouts know one size of window, but this draft has several")
    kinds = ["sliding_attention" if rule.window else "full_attention" for rule in config.attention]
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": kinds,
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows) if windows else None,
        "max_window_layers": config.layers,
    }


def _check_windows(config: DFlashConfig, from_anchor: bool) -> None:
    windows = any(rule.window for rule in config.attention)
    if windows and config.window_from_anchor != from_anchor:
        other = "zlab" if from_anchor else "speculators"
        raise ConfigError(
            f"in this layout windows are measured from elsewhere than in this draft; export it as "
            f"{other}"
        )


def _uniform_causality(config: DFlashConfig) -> bool:
    kinds = {rule.causal for rule in config.attention}
    if len(kinds) > 1:
        raise ConfigError(
            "this layout cannot say which layers are causal unless it is those with a window"
        )
    return kinds.pop()
