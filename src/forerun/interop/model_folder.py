"""A model as a folder in the published layout, with some of its tensors changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.models.configs import gguf_published
from forerun.models.gguf_file import GGUFFile
from forerun.models.hub import gguf_stops, read_config
from forerun.models.tokenizer import Tokenizer, gguf_tokenizer
from forerun.models.weights import BESIDE, NAMES, Weights, folder_weights, gguf_weights

# What transformers calls the models that come as GGUF files, by model_type.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def write_model(
    source: Path, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Copy a model, Medusa heads beside it left out.

    source: its folder, copied with its other files; or a GGUF file, whose folder is made anew, its
    weights dequantised to bfloat16. tensors: take the place of those of the same name, in their
    type, or are added. config: is added to config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        file = GGUFFile(source)
        stored = gguf_weights(file, torch.bfloat16)
        published = _write_gguf_files(file, folder)
    else:
        stored = folder_weights(source, None)
        published = read_config(source)
        for path in source.iterdir():
            if path.suffix in (".json", ".jinja", ".model") and ".index." not in path.name:
                shutil.copy(path, folder / path.name)
    state = _replaced(stored, tensors)
    save_file(state, folder / NAMES[0], metadata={"format": "pt"})
    _write(folder / "config.json", {**published, **config})


def _replaced(stored: Weights, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {
        name: entry.read(stored.dtype)
        for name, entry in stored.entries.items()
        if not name.startswith(BESIDE)
    }
    for name, tensor in tensors.items():
        state[name] = tensor.to(state[name].dtype) if name in state else tensor
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _write_gguf_files(file: GGUFFile, folder: Path) -> dict[str, Any]:
    """What lies beside the weights of a published model; gives its config."""
    tokenizer = gguf_tokenizer(file)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    ends = {"eos_token_id": gguf_stops(file)}
    _write(folder / "generation_config.json", ends)
    published = gguf_published(file)
    made = {"architectures": [CLASSES[published["model_type"]]], "torch_dtype": "bfloat16"}
    return {**made, **published, **ends}


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    template = tokenizer.chat_template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
        **({"chat_template": template.source} if template else {}),
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
