"""The tensors of a checkpoint, by their published Hugging Face names, whatever file they lie in.

Strict on purpose: a tensor that is missing, has another shape or is left over means that the model
would compute something else than its authors published.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import CheckpointError, ModelError
from forerun.models.foreign import read_json, reason
from forerun.models.gguf_file import GGUFFile

# Buffers that old versions of transformers saved and that are computed, not loaded.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")

# Before the names of Medusa heads in the folder of the model that they were trained with.
BESIDE = "medusa_head."

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that has not been read yet."""

    shape: tuple[int, ...]
    read: Callable[[torch.dtype | None], Tensor]  # None: as it is stored


class Weights:
    """Tensors that are read when they are taken, one at a time, in the type asked for.

    dtype: None leaves each in the type it is stored in.
    """

    def __init__(self, entries: dict[str, Entry], origin: str, dtype: torch.dtype | None) -> None:
        self.entries = entries
        self.origin = origin  # the file or folder, for messages
        self.dtype = dtype
        self.taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have this shape. dtype: where it is not that of the others.

        Raises `CheckpointError` when it is missing or has another one.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.origin} has no tensor '{name}'; the file is incomplete, or the config "
                "belongs to another model"
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{self.origin}: '{name}' has shape {list(entry.shape)}, the config asks for "
                f"{list(shape)}; use the config.json that belongs to these weights"
            )
        self.taken.add(name)
        return entry.read(dtype or self.dtype)

    def finish(self) -> None:
        """All that was needed was taken. Raises `CheckpointError` naming what is left over."""
        left = [n for n in self.entries if n not in self.taken and not IGNORED.search(n)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"{self.origin} has tensors that this architecture does not use: '{left[0]}'{more};"
                " use the config.json that belongs to these weights"
            )


NAMES = ("model.safetensors", "pytorch_model.bin")


def folder_weights(
    folder: Path,
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] = str,
    names: Sequence[str] = NAMES,
) -> Weights:
    """The weights of a folder: safetensors, single or sharded, else pytorch_model.bin.

    rename: the name of a tensor in the folder -> its name here; None drops it.
    names: of the file, the first that exists is read.
    Raises `CheckpointError` when there are none, a shard is missing or a file is broken.
    """
    entries: dict[str, Entry] = {}
    for path in _files(folder, names):
        read = _safetensors if path.suffix == ".safetensors" else _pickled
        for name, entry in read(path).items():
            if (renamed := rename(name)) is not None:
                entries[renamed] = entry
    return Weights(entries, str(folder), dtype)


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    for single in names:
        index = folder / f"{single}.index.json"
        if index.exists():
            return _shards(index)
        if (folder / single).exists():
            return [folder / single]
    raise CheckpointError(
        f"{folder} has no weights; it needs model.safetensors (or its index and shards) "
        "or pytorch_model.bin"
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        paths = [index.parent / name for name in names]
    except (ModelError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is damaged; fetch it again") from None
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {missing[0]}, which {index.name} names; fetch it"
        )
    return paths


def _safetensors(path: Path) -> dict[str, Entry]:
    try:
        file: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is cut short or damaged ({reason(error)}); fetch it again"
        ) from None

    def entry(name: str) -> Entry:
        shape = tuple(file.get_slice(name).get_shape())
        return Entry(shape, lambda dtype: _converted(file.get_tensor(name), dtype, path, name))

    return {name: entry(name) for name in file.keys()}  # noqa: SIM118, safe_open is no mapping


def _pickled(path: Path) -> dict[str, Entry]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: _loaded(tensor, path, name) for name, tensor in tensors.items()}
    except (pickle.UnpicklingError, AttributeError):
        raise CheckpointError(
            f"{path} holds something else than tensors; take a safetensors version"
        ) from None
    except (RuntimeError, OSError, EOFError):
        raise CheckpointError(
            f"{path} is cut short, damaged or older than torch 1.6; fetch it again, or take a "
            "safetensors version"
        ) from None


def _loaded(tensor: Tensor, path: Path, name: str) -> Entry:
    return Entry(tuple(tensor.shape), lambda dtype: _converted(tensor, dtype, path, name))


def _converted(tensor: Tensor, dtype: torch.dtype | None, path: Path, name: str) -> Tensor:
    if dtype is None:
        return tensor
    if dtype.is_floating_point and tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: '{name}' is stored as {kind}, which means nothing without its scale; take "
            "the unquantised checkpoint or a GGUF file of this model"
        )
    return tensor.to(dtype)


# How llama.cpp names the tensors of a block, and the models that are run here.
_GGUF_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_GEMMA = _GGUF_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # read with the metadata, see configs.py


def gguf_weights(file: GGUFFile, dtype: torch.dtype | None) -> Weights:
    """The weights of a GGUF file, under their Hugging Face names and in their layout; as float32
    where `dtype` is None."""
    architecture = file.metadata["general.architecture"]
    entries = {}
    for name, tensor in file.tensors.items():
        if name != ROPE_FACTORS:
            convert = _conversion(file, architecture, name)
            entries[_published_name(name, architecture)] = Entry(
                tensor.shape, _gguf_reader(file, name, convert)
            )
    return Weights(entries, str(file.path), dtype)


def _gguf_reader(
    file: GGUFFile, name: str, convert: Callable[[Tensor], Tensor] | None
) -> Callable[[torch.dtype | None], Tensor]:
    if convert is None:
        return lambda dtype: file.read(name, dtype or torch.float32)
    return lambda dtype: convert(file.read(name, torch.float32)).to(dtype or torch.float32)


def _published_name(name: str, architecture: str) -> str:
    blocks = _GGUF_GEMMA if architecture.startswith("gemma") else _GGUF_BLOCK
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_OUTER:
        return f"{_GGUF_OUTER[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in blocks:
        return f"model.layers.{match[1]}.{blocks[match[2]]}.{kind}"
    return name  # unknown: `finish` will name it


def _conversion(file: GGUFFile, architecture: str, name: str) -> Callable[[Tensor], Tensor] | None:
    """What llama.cpp changed in a tensor, undone; None where it changed nothing."""
    if architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", name)):
        key = "head_count" if match[1] == "q" else "head_count_kv"
        heads: Any = file.metadata.get(f"llama.attention.{key}")
        heads = heads or file.metadata["llama.attention.head_count"]
        return lambda rows: _halves_from_pairs(rows, heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        # Stored as 1 + weight. Subtracted in float32, so that bf16 gets back what was published.
        return lambda weight: weight - 1
    return None


def _halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k: it rotates neighbouring pairs (0, 1), (2, 3),
    ... of a head, the published layout rotates row i with row i + half."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
