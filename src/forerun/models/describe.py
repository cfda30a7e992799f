"""What a model is, read from its headers without loading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ModelError
from forerun.models import packaged
from forerun.models.architecture import DecoderConfig
from forerun.models.configs import ARCHITECTURES, decoder_config, gguf_config, text_config
from forerun.models.gguf_file import GGUFFile
from forerun.models.hub import locate, read_config
from forerun.models.target import TargetInfo
from forerun.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
from forerun.models.weights import folder_weights

OURS = "forerun's own decoder"
THEIRS = "transformers, if the check at load finds it fit"
Facts = dict[str, Any]

# What families call the same number in their config.json.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}


def describe(model: str) -> Facts:
    """Facts about a folder, a GGUF file, a packaged model or a Hub id, in the order to show them.

    `runs_with` says what would run it, or why nothing would. Raises `ModelError` when the model
    cannot be found or its files cannot be read, or when it is a packaged one not pulled yet.
    """
    path = located(model)
    if path.is_file():
        file = GGUFFile(path)
        facts = _gguf(file) | _tokenizer_facts(lambda: gguf_tokenizer(file))
    else:
        facts = _folder(path) | _tokenizer_facts(lambda: folder_tokenizer(path))
    return {"path": str(path), **facts}


def located(model: str) -> Path:
    """`hub.locate`, but nothing that comes in a package is fetched.

    Raises `ModelError` when it cannot be found or is a packaged model not pulled yet.
    """
    if model in packaged.MODELS and not Path(model).exists() and packaged.path(model) is None:
        raise ModelError(f"{model} is not here yet; run: forerun models pull {model}")
    return locate(model)


def target_info(model: str) -> TargetInfo:
    """What a draft must fit, of a model that is not loaded.

    Raises `ModelError` when it cannot be found or does not say its sizes.
    """
    path = located(model)
    facts = _gguf(GGUFFile(path)) if path.is_file() else _folder(path)
    sizes = {fact: facts.get(fact) for fact in ("layers", "hidden_size", "vocab_size", "context")}
    for fact, size in sizes.items():
        if not isinstance(size, int):
            raise ModelError(f"{model} does not say its {fact}; is it the folder of a model?")
    return TargetInfo(
        name=model,
        architecture=str(facts["architecture"]),
        vocab_size=facts["vocab_size"],
        hidden_size=facts["hidden_size"],
        layers=facts["layers"],
        max_length=facts["context"],
        dtype=torch.float32,
        device=torch.device("cpu"),
        row_invariant=False,
        tree_invariant=False,
        rope_base=facts["rotary_base"],
    )


def tokenizer(model: str) -> Tokenizer:
    """That of a model which is not loaded. Raises `ModelError` as `describe` does."""
    path = located(model)
    return gguf_tokenizer(GGUFFile(path)) if path.is_file() else folder_tokenizer(path)


def _gguf(file: GGUFFile) -> Facts:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += prod(tensor.shape)
    name = file.metadata.get("general.architecture")
    length, layers = (file.metadata.get(f"{name}.{k}") for k in ("context_length", "block_count"))
    return {
        "format": "GGUF",
        "architecture": name,
        "runs_with": _decoder_or_reason(lambda: gguf_config(file)),
        "layers": layers,
        "hidden_size": file.metadata.get(f"{name}.embedding_length"),
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())),
        "context": length,
        "rotary_base": _rotary_base(lambda: gguf_config(file)),
        "parameters": sizes.total(),
        "dtype": ", ".join(kind for kind, _ in sizes.most_common()),
    }


def _folder(path: Path) -> Facts:
    published = read_config(path)
    config = text_config(published)
    name = config.get("model_type")
    shapes = [entry.shape for entry in folder_weights(path, torch.float32).entries.values()]
    return {
        "format": "folder",
        "architecture": name,
        "runs_with": _runs_with(published, name),
        **{fact: _first(config, names) for fact, names in _NAMES.items()},
        "rotary_base": _rotary_base(lambda: decoder_config(published))
        if name in ARCHITECTURES
        else config.get("rope_theta"),
        "parameters": sum(map(prod, shapes)),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
    }


def _decoder_or_reason(read: Callable[[], DecoderConfig]) -> str:
    try:
        read()
    except ModelError as error:
        return f"nothing: {error}"
    return OURS


def _rotary_base(read: Callable[[], DecoderConfig]) -> float | None:
    try:
        return read().rope_theta
    except ModelError:
        return None


def _runs_with(published: Mapping[str, Any], kind: str | None) -> str:
    if kind in ARCHITECTURES:
        return _decoder_or_reason(lambda: decoder_config(published))
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"nothing: transformers has no causal language model of type '{kind}'"
    if MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]._is_stateful:
        return "nothing: its recurrent state cannot be rewound to drop rejected tokens"
    return THEIRS


def _tokenizer_facts(read: Callable[[], Tokenizer]) -> Facts:
    try:
        tokenizer = read()
    except ModelError as error:
        return {"tokenizer": f"none: {error}"}
    return {"tokenizer": tokenizer.vocab_size, "chat_template": tokenizer.has_chat_template}


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if name in config), None)
