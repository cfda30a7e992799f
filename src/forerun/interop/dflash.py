"""DFlash checkpoints in and out: z-lab (SpecForge, vLLM, SGLang), speculators; DeepSpec in only.

Every tensor is accounted for: one that is missing, has another shape or is left over is a
`CheckpointError`, because such drafts load elsewhere and then propose nonsense.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.config import nearest
from forerun.errors import CheckpointError, ConfigError
from forerun.interop import lent
from forerun.interop.dflash_configs import (
    is_dflash,
    read_config,
    speculators_config,
    zlab_config,
)
from forerun.models.heads.dflash import DFlash, DFlashConfig
from forerun.models.hub import read_config as read_json
from forerun.models.target import TargetInfo
from forerun.models.weights import Weights

LAYOUTS = ("zlab", "vllm", "sglang", "specforge", "speculators")
MASK_EMBEDDING = lent.BESIDE
ALIASES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
# Copies of the target's own that some exports carry along; the target has them anyway.
COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")


def detect(folder: Path) -> bool:
    """Whether a folder holds a DFlash draft, or a relative that `read` refuses by its name."""
    return (folder / "config.json").exists() and is_dflash(read_json(folder))


def read(folder: Path, dtype: torch.dtype | None = None, target: str | None = None) -> DFlash:
    """The draft of a folder, any layout. dtype: None keeps the stored one.

    target: the model that lends it rows, where it leaves some out (`lent.draft_weights`).
    Raises `CheckpointError` for tensors and settings that do not add up, and for relatives of
    DFlash that compute something else.
    """
    weights = lent.draft_weights(folder, dtype, _renamed, target=target)
    mask_embedding = _mask_embedding(folder)
    config = _config(folder, weights)
    with torch.device("meta"):
        module = DFlash(config)
    state: dict[str, Tensor] = {}
    for name, wanted in sorted(module.state_dict().items()):
        if name == "mask_embedding":
            assert mask_embedding is not None
            state[name] = mask_embedding.to(state["fc.weight"].dtype).reshape(wanted.shape)
        elif name == "d2t":
            state[name] = _offsets(weights, config, folder)
        else:
            state[name] = weights.take(name, *wanted.shape)
    if not config.reduced:
        _check_identity(weights, folder)
    weights.finish()
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False)


def settings(folder: Path) -> DFlashConfig:
    """The numbers of a draft; no tensor is read. Raises as `read` does."""
    return _config(folder, lent.draft_weights(folder, None, _renamed))


def _config(folder: Path, weights: Weights) -> DFlashConfig:
    """What config.json says, and of what the tensors tell, what they do."""
    config = read_config(read_json(folder), folder)
    return config.model_copy(
        update={
            "own_embedding": "embed_tokens.weight" in weights,
            "own_mask_embedding": (folder / MASK_EMBEDDING).exists(),
            "draft_vocab_size": _draft_vocab_size(config, weights, folder),
        }
    )


def _renamed(name: str) -> str | None:
    for prefix, ours in ALIASES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    return None if name in COPIES else name


def _draft_vocab_size(config: DFlashConfig, weights: Weights, folder: Path) -> int | None:
    """Rows of the draft's own head; None where it uses the target's."""
    head = weights.entries.get("lm_head.weight")
    if head is not None:
        rows = head.shape[0]
        if config.draft_vocab_size not in (None, rows):
            raise CheckpointError(
                f"{folder}: config.json says draft_vocab_size {config.draft_vocab_size}, "
                f"lm_head.weight has {rows} rows; use the config.json that belongs to these weights"
            )
        return rows
    if config.reduced:
        raise CheckpointError(
            f"{folder} drafts from {config.draft_vocab_size} tokens but has no lm_head.weight for "
            "them; fetch it again"
        )
    return None


def _offsets(weights: Weights, config: DFlashConfig, folder: Path) -> Tensor:
    """`d2t`, checked: what is added to each draft id gives ascending ids of the target."""
    size = config.draft_vocab_size or 0
    offsets_U = weights.take("d2t", size, dtype=torch.int64)
    ids_U = torch.arange(size) + offsets_U
    ascending = bool((ids_U[1:] > ids_U[:-1]).all())
    if not ascending or not 0 <= int(ids_U.min()) <= int(ids_U.max()) < config.vocab_size:
        raise CheckpointError(
            f"{folder}: d2t does not lead from draft ids to ascending ids below "
            f"{config.vocab_size}; it must hold offsets (target id - draft id)"
        )
    if "t2d" in weights:
        known_V = weights.take("t2d", config.vocab_size, dtype=torch.bool)
        if not torch.equal(known_V.nonzero()[:, 0], ids_U):
            raise CheckpointError(f"{folder}: t2d and d2t name different tokens; fetch it again")
    return offsets_U


def _check_identity(weights: Weights, folder: Path) -> None:
    """Maps of a whole vocabulary, where they are stored, must map every token to itself."""
    for name, identity in (("d2t", 0), ("t2d", 1)):
        if entry := weights.entries.get(name):
            weights.taken.add(name)
            if bool((entry.read(torch.int64) != identity).any()):
                raise CheckpointError(
                    f"{folder} maps a reduced vocabulary in {name} but drafts from all tokens; "
                    "use the config.json that belongs to these weights"
                )


def _mask_embedding(folder: Path) -> Tensor | None:
    path = folder / MASK_EMBEDDING
    if not path.exists():
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a plain tensor; fetch it again") from error
    tensor = stored.get("embedding") if isinstance(stored, Mapping) else stored
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} holds no tensor; fetch it again")
    return tensor


# ---- writing ------------------------------------------------------------------------------------


def export(module: DFlash, layout: str, folder: Path, target: str | None = None) -> str:
    """Write a draft for others; gives the command line that serves it.

    layout: one of `LAYOUTS`; all but speculators are the z-lab files, which vLLM reads with a head
    of its own, too. target: the model it belongs to, for the command line and for speculators.
    Raises `ConfigError` where the layout cannot express the draft.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"DFlash has no layout '{layout}'; {nearest(layout, (*LAYOUTS, lent.LAYOUT))}"
        )
    config = module.config
    speculators = layout == "speculators"
    if config.draft_vocab_size is not None and layout not in ("vllm", "speculators"):
        raise ConfigError(
            f"{layout} knows no draft with a head of its own; export it as vllm or speculators"
        )
    if config.own_mask_embedding and layout != "vllm":
        raise ConfigError(f"{layout} knows no mask embedding of its own; export it as vllm")
    written = speculators_config(config, target) if speculators else zlab_config(config)
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    written["torch_dtype"] = str(module.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    if config.own_mask_embedding:
        mask = {"embedding": state.pop("mask_embedding"), "mask_token_id": config.mask_token}
        torch.save(mask, folder / MASK_EMBEDDING)
    if config.reduced:
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        state["t2d"][torch.arange(len(module.d2t)) + module.d2t.cpu()] = True
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return _command_line(layout, folder, config, target or "TARGET")


def _command_line(layout: str, folder: Path, config: DFlashConfig, target: str) -> str:
    if layout in ("sglang", "specforge"):
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {folder} "
            f"--speculative-num-draft-tokens {config.block_size}"
        )
    options = {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.drafts}
    return f"vllm serve {target} --speculative-config '{json.dumps(options)}'"


# ---- describing ---------------------------------------------------------------------------------


def describe(folder: Path, target: TargetInfo | None = None) -> list[str]:
    """What a folder is, in plain sentences. `! ` stands before what looks wrong, `? ` before what
    its files leave open.

    target: the model it is meant for. Raises `CheckpointError` where it cannot be read.
    """
    module = read(folder, target=target.name if target else None)
    published = read_json(folder)
    base = module.config.rope_theta
    questions = []
    if target and target.rope_base not in (None, base):
        questions = [f"its rotary base is {base:g}, that of {target.name} {target.rope_base:g}"]
    return [
        *_what(module.config, published),
        *lent.sentence(folder),
        *_conventions(module.config, published),
        *(f"? {question}" for question in questions),
        *(f"! {doubt}" for doubt in _doubts(module, published)),
        *(f"! {misfit}" for misfit in (misfits(module.config, target) if target else ())),
    ]


def misfits(config: DFlashConfig, target: TargetInfo) -> list[str]:
    """Why a draft cannot run ahead of a target; empty where it can."""
    found = []
    if config.target_hidden_size != target.hidden_size:
        found.append(
            f"it reads hidden states of size {config.target_hidden_size}, {target.name} has "
            f"{target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        found.append(
            f"it was made for {config.vocab_size} tokens, {target.name} has {target.vocab_size}"
        )
    if config.taps[-1] > target.layers:
        found.append(f"it reads behind layer {config.taps[-1]}, {target.name} has {target.layers}")
    elif config.target_layers not in (None, target.layers, config.taps[-1]):
        found.append(
            f"it was made for {config.target_layers} layers, {target.name} has {target.layers}"
        )
    if not config.own_embedding and config.hidden_size != target.hidden_size:
        found.append(f"its width {config.hidden_size} does not take the embedding of {target.name}")
    return found


def _what(config: DFlashConfig, published: Mapping[str, Any]) -> list[str]:
    layout = "speculators" if "speculators_model_type" in published else "z-lab"
    if "speculators_model_type" not in published and "dflash_config" not in published:
        layout = "DeepSpec"
    layers = "1 layer" if config.layers == 1 else f"{config.layers} layers"
    verifier = published.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    made_for = f" ({verifier})" if verifier else ""
    deep = f"{config.target_layers} layers, " if config.target_layers else ""
    head = "the target's output head"
    if config.draft_vocab_size is not None:
        head = f"a head of its own over {config.draft_vocab_size} tokens"
    embedding = "an embedding of its own" if config.own_embedding else "the target's embedding"
    return [
        f"a DFlash draft in {layout} layout: {layers} of width {config.hidden_size}, {embedding} "
        f"and {head}",
        f"for a target{made_for} of {deep}width {config.target_hidden_size} and "
        f"{config.vocab_size} tokens",
    ]


def _conventions(config: DFlashConfig, published: Mapping[str, Any]) -> list[str]:
    place = "anchor first" if config.anchor_first else "in place"
    scaling = (config.rope_scaling or {}).get("rope_type", "unscaled")
    return [
        f"it reads the outputs of layers {', '.join(str(tap - 1) for tap in config.taps)} (from 0)",
        f"blocks of {config.block_size} slots draft {config.drafts} tokens, {place}; "
        f"the mask token is {config.mask_token}",
        f"attention inside a block: {_attention(config)}",
        f"rotary base {config.rope_theta:g}, {scaling}; made for {config.max_length} positions",
    ]


def _attention(config: DFlashConfig) -> str:
    kinds = []
    for rule in dict.fromkeys(config.attention):
        count = config.attention.count(rule)
        window = f", window {rule.window}" if rule.window else ""
        kinds.append(f"{count} {'causal' if rule.causal else 'bidirectional'}{window}")
    return "; ".join(kinds)


def _doubts(module: DFlash, published: Mapping[str, Any]) -> list[str]:
    config = module.config
    doubts = []
    layers = published.get("transformer_layer_config", published)
    if not (layers.get("rope_theta") or layers.get("rope_parameters")):
        doubts.append(
            "config.json names no rotary base: 10000 is taken, as transformers does; vLLM would "
            "take 1000000"
        )
    unflagged = published.get("sliding_window_non_causal") is False
    if unflagged and not any(rule.window for rule in config.attention):
        doubts.append(
            "sliding_window_non_causal is false without sliding layers: vLLM 0.32 would make every "
            "layer causal; export it again"
        )
    if config.anchor_first:
        doubts.append("vLLM and the dflash package draft in place: there it would be off by one")
    for name, tensor in module.named_parameters():
        if not tensor.isfinite().all():
            doubts.append(f"{name} holds numbers that are not finite")
        elif tensor.ndim == 2 and not tensor.any():
            doubts.append(f"{name} is all zero")
    if config.own_embedding:
        spread = module.embed_tokens.weight.float().std().item()
        if not 1e-3 < spread < 10:
            doubts.append(f"its embedding looks random or empty (spread {spread:.2g})")
    return doubts
