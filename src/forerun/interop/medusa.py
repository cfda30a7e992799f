"""Medusa checkpoints, in and out: four published layouts.

    medusa    heads alone (FasterDecoding v1.3): `{i}.{j}.linear.*`, `{i}.{n}.weight` in
              medusa_lm_head.pt; without output matrices it is version 2, in .safetensors
    medusa2   heads beside the model they were trained with (Medusa-2, "1.0"): the same names behind
              `medusa_head.` in a folder that is a model of its own
    vllm      `blocks.{i}.layers.{j}.*`, `lm_heads.{i}.weight`, perhaps `token_map`

The number of heads and layers is that of the tensors: published configs are known to be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.config import nearest
from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.interop import lent
from forerun.interop.model_folder import write_model
from forerun.models.gguf_file import GGUFFile
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.hub import locate, read_config
from forerun.models.target import TargetInfo
from forerun.models.weights import BESIDE, NAMES, Weights, folder_weights, gguf_weights

LAYOUTS = ("vllm", "medusa", "medusa2")
OTHERS = {
    "sglang": "SGLang has no Medusa algorithm (its own are EAGLE, EAGLE3, STANDALONE, NGRAM and "
    "DFLASH)",
    "speculators": "the speculators format knows no Medusa heads",
    "specforge": "SpecForge knows no Medusa heads",
}
# vLLM 0.32 forgets that it has read token_map, and stops because of it unless told not to look.
UNTRACKED = """--model-loader-extra-config '{"enable_weights_track": false}'"""
PICKLED, SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"


# ---- reading ------------------------------------------------------------------------------------


def detect(folder: Path) -> bool:
    """Whether a folder holds Medusa heads."""
    if (folder / SAFE).exists() or (folder / PICKLED).exists():
        return True
    if not (folder / "config.json").exists():
        return False
    config = read_config(folder)
    return (
        config.get("model_type") == "medusa"
        or "MedusaModel" in (config.get("architectures") or ())
        or "medusa_num_heads" in config
    )


def lies_beside_its_model(folder: Path) -> bool:
    """Whether the heads of a folder are Medusa-2: the folder is a model, too."""
    return _find(folder, None).layout == "medusa2"


def read(folder: Path, dtype: torch.dtype | None = None, target: str | None = None) -> MedusaHeads:
    """The heads of a folder, any layout. dtype: None keeps the stored one.

    target: the model that lends them rows, where they leave some out (`lent.draft_weights`).
    Raises `CheckpointError` for tensors that are missing, left over or of the wrong shape.
    """
    found = _find(folder, dtype, target)
    config, weights = _config(found), found.weights
    with torch.device("meta"):
        module = MedusaHeads(config)
    state = {}
    ids_U = _token_map(found, config)
    for name, wanted in module.state_dict().items():
        if name == "token_map":
            state[name] = ids_U
        elif ids_U is not None and name.startswith("lm_heads."):
            state[name] = _rows(weights, name, ids_U, config)
        else:
            state[name] = weights.take(name, *wanted.shape)
    weights.finish()
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False)


def settings(folder: Path) -> MedusaConfig:
    """The numbers of heads; no tensor is read. Raises as `read` does."""
    return _config(_find(folder, None))


@dataclass(frozen=True, slots=True)
class _Found:
    """What lies in a folder; tensors by their names in vLLM's layout."""

    folder: Path
    layout: str
    published: dict[str, Any]
    weights: Weights


def _find(folder: Path, dtype: torch.dtype | None, target: str | None = None) -> _Found:
    published = read_config(folder)
    stored = lent.draft_weights(folder, dtype, names=(SAFE, PICKLED, *NAMES), target=target)
    layout = _layout(stored)
    names = [n for n in stored.entries if layout != "medusa2" or n.startswith(BESIDE)]
    layers = _layers(names)
    entries = {_renamed(name, layers): stored.entries[name] for name in names}
    return _Found(folder, layout, published, Weights(entries, stored.origin, dtype))


def _layout(stored: Weights) -> str:
    for name in stored.entries:
        if name.startswith(BESIDE):
            return "medusa2"
        if re.match(r"(medusa_heads\.)?(blocks|lm_heads)\.\d", name):
            return "vllm"
        if re.match(r"\d+\.\d+\.", name):
            return "medusa"
    raise CheckpointError(
        f"{stored.origin} holds no Medusa heads in a layout that is read; it needs tensors named "
        "'0.0.linear.weight', 'medusa_head.0.0.linear.weight' or 'blocks.0.layers.0.weight'"
    )


def _layers(names: list[str]) -> int:
    """Residual layers per head in the layouts that number them together with the output."""
    indices = [int(m[1]) for name in names if (m := re.search(r"\d\.(\d+)\.linear\.", name))]
    return max(indices, default=-1) + 1


def _renamed(name: str, layers: int) -> str:
    """A name in vLLM's layout; what fits no layout stays as it is, and is left over."""
    bare = name.removeprefix("medusa_heads.").removeprefix(BESIDE)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", bare):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(rf"(\d+)\.{layers}\.weight", bare):
        return f"lm_heads.{match[1]}.weight"
    return bare


def _config(found: _Found) -> MedusaConfig:
    entries, published = found.weights.entries, found.published
    blocks = [m for name in entries if (m := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name))]
    matrices = [int(m[1]) for name in entries if (m := re.match(r"lm_heads\.(\d+)\.", name))]
    first = next(entries[name] for name in entries if name.startswith(("blocks.", "lm_heads.")))
    width = next((entries[m.string].shape[-1] for m in blocks), first.shape[-1])
    output: Literal["each", "one", "target"] = "each" if matrices else "target"
    if len(matrices) == 1 and published.get("original_lm_head"):
        output = "one"
    if "token_map" in entries and not matrices:
        raise CheckpointError(
            f"{found.folder} drafts from a part of the vocabulary but has no lm_heads.0.weight for "
            "it; fetch it again"
        )
    rows = entries[f"lm_heads.{min(matrices)}.weight"].shape[0] if matrices else None
    reduced = entries["token_map"].shape[0] if "token_map" in entries else None
    return MedusaConfig(
        hidden_size=width,
        heads=max([int(m[1]) for m in blocks] + (matrices if output == "each" else [])) + 1,
        layers=max((int(m[2]) for m in blocks), default=-1) + 1,
        bias=any(name.endswith(".bias") for name in entries),
        output=output,
        vocab_size=rows if reduced is None else _full_vocabulary(found),
        draft_vocab_size=reduced,
        base_model=published.get("base_model_name_or_path")
        or (str(found.folder) if found.layout == "medusa2" else None),
        own_backbone=found.layout == "medusa2",
    )


def _full_vocabulary(found: _Found) -> int:
    size = found.published.get("vocab_size")
    if not isinstance(size, int):
        raise CheckpointError(
            f"{found.folder} drafts from a part of the vocabulary, and config.json does not say of "
            "how many tokens; add the vocab_size of the target"
        )
    return size


def _token_map(found: _Found, config: MedusaConfig) -> Tensor | None:
    """The target's id of each draft id, checked."""
    weights, size = found.weights, config.draft_vocab_size
    named = found.published.get("truncated_vocab_size")
    if size is None:
        if named is not None and config.vocab_size and named < config.vocab_size:
            raise CheckpointError(
                f"{found.folder}: config.json says truncated_vocab_size {named} but there is no "
                "token_map; use the config.json that belongs to these weights"
            )
        return None
    ids_U = weights.take("token_map", size, dtype=torch.int64)
    assert config.vocab_size
    inside = bool(((ids_U >= 0) & (ids_U < config.vocab_size)).all())
    if not inside or len(ids_U.unique()) < size:
        raise CheckpointError(
            f"{found.folder}: token_map must name {size} different tokens below "
            f"{config.vocab_size}; fetch it again"
        )
    return ids_U


def _rows(weights: Weights, name: str, ids_U: Tensor, config: MedusaConfig) -> Tensor:
    """The rows of the draft's tokens, from a matrix of these or, as vLLM allows, of all tokens."""
    assert config.vocab_size
    entry = weights.entries.get(name)
    if entry is not None and entry.shape[0] == config.vocab_size:
        return weights.take(name, config.vocab_size, config.hidden_size)[ids_U]
    return weights.take(name, len(ids_U), config.hidden_size)


# ---- fitting a target ---------------------------------------------------------------------------


def misfits(config: MedusaConfig, folder: Path, target: TargetInfo) -> list[str]:
    """Why heads cannot run on a target, in sentences that end with what to do; empty: they can."""
    found = []
    if config.own_backbone and not _same_folder(folder, target.name):
        found.append(
            f"the heads in {folder} were trained together with the model in the same folder "
            f"(Medusa-2) and guess wrong on {target.name}; use --model {folder}"
        )
    if config.hidden_size != target.hidden_size:
        found.append(
            f"the heads in {folder} read hidden states of size {config.hidden_size}, {target.name} "
            f"has {target.hidden_size}; choose heads made for it"
        )
    if config.vocab_size not in (None, target.vocab_size):
        found.append(
            f"the heads in {folder} were made for {config.vocab_size} tokens, {target.name} has "
            f"{target.vocab_size}; choose heads made for it"
        )
    return found


def _same_folder(folder: Path, model: str) -> bool:
    try:
        return locate(model).resolve() == folder.resolve()
    except ModelError:
        return False


# ---- writing ------------------------------------------------------------------------------------


def export(module: MedusaHeads, layout: str, folder: Path, target: str | None = None) -> str:
    """Write heads for others; gives the command line that runs them.

    layout: vllm; medusa, for the authors' own code and TGI; medusa2, beside a copy of their model.
    target: folder, file or name of the model; its output head is read where the layout stores it.
    Raises `ConfigError` where the layout cannot express the heads.
    """
    if reason := OTHERS.get(layout):
        raise ConfigError(f"{reason}; export these heads as vllm")
    if layout not in LAYOUTS:
        raise ConfigError(
            f"Medusa has no layout '{layout}'; {nearest(layout, (*LAYOUTS, lent.LAYOUT))}"
        )
    write = {"vllm": _write_vllm, "medusa": _write_medusa, "medusa2": _write_medusa2}[layout]
    return write(module, folder, target)


def _write_vllm(module: MedusaHeads, folder: Path, target: str | None) -> str:
    config = module.config
    state = _contiguous(module.state_dict())
    if config.output == "target":
        state["lm_heads.0.weight"] = _target_head(target, config).to(_dtype(module))
    vocab_size = config.vocab_size or len(state["lm_heads.0.weight"])
    published = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "vocab_size": vocab_size,
        "truncated_vocab_size": config.draft_vocab_size or vocab_size,
        "medusa_fc_bias": config.bias,  # vLLM leaves biases out unless it is told
        "original_lm_head": config.output != "each",
    }
    _save(state, folder / NAMES[0])
    _write_config(folder, published | _made_for(config, target))
    options = {
        "method": "medusa",
        "model": str(folder),
        "num_speculative_tokens": config.heads,
    }
    model = target or config.base_model or "TARGET"
    line = f"vllm serve {model} --speculative-config '{json.dumps(options)}'"
    return f"{line} {UNTRACKED}" if config.draft_vocab_size else line


def _write_medusa(module: MedusaHeads, folder: Path, target: str | None) -> str:
    config = module.config
    state = _in_authors_layout(module, target)
    published: dict[str, Any] = {
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        **_made_for(config, target),
    }
    if config.output == "each":
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / PICKLED)
        _write_config(folder, published)
        return f"python -m medusa.inference.cli --model {folder}"
    _save(state, folder / SAFE)
    _write_config(folder, published | {"version": "2"})
    return f"text-generation-launcher --model-id {folder}"


def _write_medusa2(module: MedusaHeads, folder: Path, target: str | None) -> str:
    """The model and the heads in one file of weights, the other files of the model beside it."""
    model = target or module.config.base_model
    if model is None:
        raise ConfigError("the medusa2 layout holds the model, too; name it with --target")
    source = locate(model)
    if module.config.own_backbone and not _same_folder(source, module.config.base_model or ""):
        raise ConfigError(
            f"these heads belong to the model in {module.config.base_model}; export them without "
            "--target"
        )
    return write_beside(module, source, folder, {})


def write_beside(
    module: MedusaHeads, source: Path, folder: Path, changed: Mapping[str, Tensor]
) -> str:
    """Heads with their model in the medusa2 layout; gives the command line that runs them.

    source: folder or file of the model. changed: tensors of it that are others now, by their
    published names.
    """
    heads = _in_authors_layout(module, str(source))
    beside = {BESIDE + name: tensor for name, tensor in heads.items()}
    counts = {"medusa_num_heads": module.config.heads, "medusa_num_layers": module.config.layers}
    write_model(source, folder, {**changed, **beside}, counts)
    return f'forerun generate "PROMPT" --model {folder} --draft medusa:{folder}'


def _made_for(config: MedusaConfig, target: str | None) -> dict[str, str]:
    name = target or config.base_model
    return {"base_model_name_or_path": name} if name else {}


def _in_authors_layout(module: MedusaHeads, target: str | None) -> dict[str, Tensor]:
    """Tensors by the names of the authors' layouts, which always have biases and have no maps.

    A matrix that all heads share is left out: there the target's own head takes its place.
    """
    config = module.config
    if config.draft_vocab_size is not None:
        raise ConfigError(
            "only vLLM's layout can hold heads for a part of the vocabulary; export them as vllm"
        )
    state = module.state_dict()
    if config.output == "one":
        shared = state["lm_heads.0.weight"].cpu()
        if not torch.equal(_target_head(target, config).to(shared.dtype), shared):
            raise ConfigError(
                "these heads share an output matrix that is not the target's own, which only "
                "vLLM's layout can hold; export them as vllm"
            )
    return numbered(module)


def numbered(module: MedusaHeads) -> dict[str, Tensor]:
    """Tensors of heads by the authors' names: a head is a list, `{head}.{place in the list}.*`."""
    config, state = module.config, module.state_dict()
    named = {}
    for i in range(config.heads):
        for j in range(config.layers):
            weight = state[f"blocks.{i}.layers.{j}.weight"]
            none = weight.new_zeros(config.hidden_size)
            named[f"{i}.{j}.linear.weight"] = weight
            named[f"{i}.{j}.linear.bias"] = state.get(f"blocks.{i}.layers.{j}.bias", none)
        if config.output == "each":
            named[f"{i}.{config.layers}.weight"] = state[f"lm_heads.{i}.weight"]
    return _contiguous(named)


def _target_head(target: str | None, config: MedusaConfig) -> Tensor:
    """The output matrix of the target, as it is stored."""
    name = target or config.base_model
    if name is None:
        raise ConfigError(
            "these heads use the output matrix of their target, which is needed here; "
            "name its folder or file with --target"
        )
    path = locate(name)
    tied = "model.embed_tokens.weight"
    stored = gguf_weights(GGUFFile(path), None) if path.is_file() else folder_weights(path, None)
    entry = stored.entries.get("lm_head.weight") or stored.entries.get(tied)
    if entry is None or entry.shape[-1] != config.hidden_size:
        raise ConfigError(
            f"{name} has no output matrix of width {config.hidden_size}; "
            "name the target of these heads with --target"
        )
    return entry.read(None)


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _dtype(module: MedusaHeads) -> torch.dtype:
    return next(module.parameters()).dtype


def _save(state: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt"})


def _write_config(folder: Path, published: Mapping[str, Any]) -> None:
    text = json.dumps(published, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


# ---- describing ---------------------------------------------------------------------------------


def describe(folder: Path, target: TargetInfo | None = None) -> list[str]:
    """What a folder is, in plain sentences; what looks wrong starts with `! `.

    target: the model it is meant for. Raises `CheckpointError` where it cannot be read.
    """
    module = read(folder, target=target.name if target else None)
    found = _find(folder, None)
    config = module.config
    return [
        *_what(found, config),
        *lent.sentence(folder),
        *(f"! {doubt}" for doubt in _doubts(found, module)),
        *(f"! {misfit}" for misfit in (misfits(config, folder, target) if target else ())),
    ]


def _what(found: _Found, config: MedusaConfig) -> list[str]:
    output = {
        "each": f"an output matrix each over {config.draft_vocab_size or config.vocab_size} tokens",
        "one": "one output matrix of their own for all of them",
        "target": "the target's own output matrix",
    }[config.output]
    layers = "1 residual layer" if config.layers == 1 else f"{config.layers} residual layers"
    base = f", made for {config.base_model}" if config.base_model else ""
    sentences = [
        f"{config.heads} Medusa heads in {found.layout} layout with {output}{base}",
        f"each has {layers} of width {config.hidden_size}, {'with' if config.bias else 'without'} "
        "biases, on the target's last hidden state behind its final norm",
    ]
    if config.draft_vocab_size:
        sentences.append(f"they draft from a part of the target's {config.vocab_size} tokens")
    if config.own_backbone:
        sentences.append(
            "the model in this folder was trained together with them (Medusa-2) and is the only "
            f"one they fit: use --model {found.folder} --draft medusa:{found.folder}"
        )
    return sentences


def _doubts(found: _Found, module: MedusaHeads) -> Iterator[str]:
    """What looks wrong, or would go wrong elsewhere."""
    config, published = module.config, found.published
    rows = config.draft_vocab_size or config.vocab_size
    stored = {
        "medusa_num_heads": config.heads,
        "num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": rows,
    }
    if found.layout == "vllm":
        stored["num_hidden_layers"] = config.layers
    for name, number in stored.items():
        said = published.get(name)
        if None not in (said, number) and said != number:
            yield f"config.json says {name} {said}, the tensors say {number}, which is used"
    if found.layout == "vllm" and config.bias and not published.get("medusa_fc_bias"):
        yield "biases are stored but medusa_fc_bias is not set, so vLLM leaves them out"
    if found.layout == "vllm" and config.output == "target":
        yield "no output matrix is stored: vLLM needs one; export it again as vllm"
    if config.draft_vocab_size and config.output == "each":
        yield "vLLM 0.32 cannot load a reduced matrix per head; there they must share one"
    elif config.draft_vocab_size:
        yield f"vLLM 0.32 loads a reduced vocabulary only with {UNTRACKED}"
    if not config.bias:
        yield "there are no biases: heads that were trained with them have lost some acceptance"
    if config.layers and not any(weight.any() for weight in module.blocks.parameters()):
        yield "all residual layers are zero: these heads are not trained"
    for name, tensor in module.named_parameters():
        if not tensor.isfinite().all():
            yield f"{name} holds numbers that are not finite"
    if config.heads > 1 and _same(module.blocks[0], module.blocks[1]):
        yield "the first two heads are equal: they cannot both be right"


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)
