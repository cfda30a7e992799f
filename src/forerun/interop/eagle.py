"""EAGLE drafts as files: EAGLE-1/2 and EAGLE-3 of SafeAILab, SpecForge, SGLang and speculators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.config import nearest
from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.interop import lent
from forerun.interop.eagle_configs import (
    FLAGS,
    TAPS,
    eagle1_settings,
    eagle3_settings,
    flat_config,
    is_speculators,
    layer_config,
    speculators_config,
)
from forerun.models.heads.eagle import (
    Eagle1,
    Eagle3,
    Eagle3Settings,
    EagleDraft,
    EagleSettings,
    default_taps,
)
from forerun.models.heads.layers import fill
from forerun.models.hub import read_config
from forerun.models.target import TargetInfo
from forerun.models.weights import Weights, folder_weights

LAYOUTS = ("safeailab", "specforge", "sglang", "vllm", "speculators")
PREFIXES = ("draft_model.", "model.")  # of raw dumps of trainers
# Copies of the target's own that some dumps carry along; the target has them anyway.
COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
HIDDEN_NORM = "layers.0.hidden_norm.weight"  # marks EAGLE-3
INPUT_NORM = "layers.0.input_layernorm.weight"  # which the first layer of EAGLE-1 lacks


def detect(folder: Path) -> bool:
    """Whether a folder holds an EAGLE draft of any kind."""
    try:
        return _kind(lent.draft_weights(folder, torch.float32, _renamed)) is not None
    except ModelError:
        return False


def read(
    folder: Path, dtype: torch.dtype | None = torch.float32, target: str | None = None
) -> Eagle1 | Eagle3:
    """The draft of a folder, any layout. dtype: None leaves tensors in the type they are stored in.

    target: the model that lends it rows, where it leaves some out (`lent.draft_weights`).
    Raises `CheckpointError` for tensors and settings that do not add up.
    """
    module, weights = _opened(folder, dtype, target)
    _check_vocabulary(weights, module.settings, folder)
    fill(module, weights)
    return module.requires_grad_(False)


def settings(folder: Path) -> EagleSettings:
    """The numbers of a draft; no tensor is read. Raises as `read` does."""
    return _opened(folder, None, None)[0].settings


def _opened(
    folder: Path, dtype: torch.dtype | None, target: str | None
) -> tuple[Eagle1 | Eagle3, Weights]:
    """The network, still without numbers, and what will fill it."""
    config = read_config(folder)
    weights = lent.draft_weights(folder, dtype, _renamed, target=target)
    kind = _kind(weights)
    if kind is None:
        raise CheckpointError(
            f"{folder} is no EAGLE draft: it has neither {HIDDEN_NORM} (EAGLE-3) nor fc.weight "
            "beside one layer without an input norm (EAGLE-1); forerun inspect says what it is"
        )
    module: Eagle1 | Eagle3
    try:
        with torch.device("meta"):
            if kind is Eagle3:
                module = Eagle3(eagle3_settings(config, weights, folder))
            else:
                module = Eagle1(eagle1_settings(config, weights, folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}; fetch its own config.json") from None
    return module, weights


def _renamed(name: str) -> str | None:
    """Published names -> those of the modules, which are speculators' and EAGLE-1's."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    return None if name in COPIES else name


def _kind(weights: Weights) -> type[Eagle1] | type[Eagle3] | None:
    """Which network the tensors belong to, even if one of them is missing."""
    if HIDDEN_NORM in weights:
        return Eagle3
    if not any(name.startswith("layers.0.") for name in weights.entries):
        return None
    fuses = "fc.weight" in weights and "hidden_norm.weight" not in weights  # DFlash has one
    if INPUT_NORM in weights:
        return Eagle3 if fuses else None
    return Eagle1 if fuses or "norm.weight" not in weights else None


def _check_vocabulary(weights: Weights, settings: EagleSettings, folder: Path) -> None:
    """`d2t` holds offsets from draft ids to ascending target ids, `t2d` marks the same ids."""
    size, draft_size = settings.vocab_size, settings.vocab_size
    if isinstance(settings, Eagle3Settings):
        draft_size = settings.draft_vocab_size
    ids_U = torch.arange(draft_size)
    if draft_size < size and "d2t" not in weights:
        return  # `fill` will say so
    if "d2t" in weights:
        ids_U = ids_U + weights.take("d2t", draft_size, dtype=torch.int64)
        ascending = bool((ids_U[1:] > ids_U[:-1]).all())
        if not ascending or int(ids_U[0]) < 0 or int(ids_U[-1]) >= size:
            raise CheckpointError(
                f"{folder}: d2t does not lead from draft ids to ascending ids below {size}; "
                "it must hold offsets (target id - draft id)"
            )
    if "t2d" in weights:
        known_V = weights.take("t2d", size, dtype=torch.bool)
        if not torch.equal(known_V.nonzero()[:, 0], ids_U):
            raise CheckpointError(f"{folder}: t2d and d2t name different tokens; fetch it again")


# ---- writing ------------------------------------------------------------------------------------


def export(module: EagleDraft, layout: str, folder: Path, target: str = "TARGET") -> str:
    """Write a draft for others; gives the command line that serves it.

    layout: one of `LAYOUTS`. target: what the command line names as the model. If that is a folder,
    its embedding goes into a speculators draft, which the package would run with garbage otherwise.
    Raises `ConfigError` where the layout cannot express the draft.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"EAGLE has no layout '{layout}'; {nearest(layout, (*LAYOUTS, lent.LAYOUT))}"
        )
    settings = module.settings
    eagle3 = isinstance(settings, Eagle3Settings)
    if layout == "specforge" and not eagle3:
        raise ConfigError("specforge knows no EAGLE-1 drafts; export it as vllm or sglang")
    if layout == "speculators":
        written = speculators_config(settings, target)
    else:
        written = flat_config(settings, layout)
    written["torch_dtype"] = str(module.state_dict()["fc.weight"].dtype).removeprefix("torch.")
    midlayer = eagle3 and layout != "speculators" and settings.layers == 1
    tensors = _published(module, layout)
    if layout == "speculators" and Path(target).is_dir():
        tensors.setdefault("embed_tokens.weight", _embedding(Path(target), module))
    if midlayer:
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return _command_line(layout, folder, "eagle3" if eagle3 else "eagle", target)


def _published(module: EagleDraft, layout: str) -> dict[str, Tensor]:
    """The tensors with the vocabulary's maps, which SpecForge wants even where they say nothing."""
    settings = module.settings
    tensors = {name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()}
    if not isinstance(settings, Eagle3Settings):
        return tensors
    if settings.reduced or layout == "specforge":
        ids_U = torch.arange(settings.draft_vocab_size)
        offsets_U = tensors.setdefault("d2t", torch.zeros_like(ids_U))
        tensors["t2d"] = torch.zeros(settings.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids_U + offsets_U] = True
    return tensors


def _embedding(target: Path, module: EagleDraft) -> Tensor:
    settings, dtype = module.settings, module.state_dict()["fc.weight"].dtype
    weights = folder_weights(target, dtype)
    return weights.take("model.embed_tokens.weight", settings.vocab_size, settings.hidden_size)


def _command_line(layout: str, folder: Path, method: str, target: str) -> str:
    if layout in ("sglang", "specforge"):
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {method.upper()} --speculative-draft-model-path {folder} "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
    if layout == "safeailab":
        flag = "" if method == "eagle3" else ", use_eagle3=False"
        call = (
            f"EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{folder}'{flag})"
        )
        return f'python -c "from eagle.model.ea_model import EaModel; {call}"'
    options = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    return f"vllm serve {target} --speculative-config '{json.dumps(options)}'"


# ---- describing ---------------------------------------------------------------------------------


def describe(folder: Path, target: TargetInfo | None = None) -> list[str]:
    """What a folder is, in plain sentences. `! ` stands before what looks wrong, `? ` before what
    its files leave open.

    target: the model it is meant for. Raises `CheckpointError` where it cannot be read.
    """
    module = read(folder, target=target.name if target else None)
    published = read_config(folder)
    return [
        *_what(module, published),
        *lent.sentence(folder),
        *_conventions(module, published),
        *(f"? {question}" for question in _questions(module.settings, published, target)),
        *(f"! {doubt}" for doubt in _doubts(module, published)),
        *(f"! {misfit}" for misfit in (misfits(module.settings, target) if target else ())),
    ]


def misfits(settings: EagleSettings, target: TargetInfo) -> list[str]:
    """Why a draft cannot run ahead of a target; empty where it can."""
    found = []
    width = settings.hidden_size
    if isinstance(settings, Eagle3Settings):
        width = settings.target_hidden_size
        if reason := _wrong_taps(settings.taps or default_taps(target.layers), target):
            found.append(reason)
    if width != target.hidden_size:
        found.append(
            f"it reads hidden states of size {width}, {target.name} has {target.hidden_size}"
        )
    if settings.vocab_size != target.vocab_size:
        found.append(
            f"it was made for {settings.vocab_size} tokens, {target.name} has {target.vocab_size}"
        )
    if not settings.own_embedding and settings.hidden_size != target.hidden_size:
        found.append(
            f"its width {settings.hidden_size} does not take the embedding of {target.name}"
        )
    return found


def _wrong_taps(taps: tuple[int, ...], target: TargetInfo) -> str | None:
    ascending = all(low < high for low, high in pairwise(taps))
    if ascending and taps[0] >= 0 and taps[-1] <= target.layers:
        return None
    return (
        f"it reads before layers {', '.join(map(str, taps))}, which do not ascend within the "
        f"{target.layers} layers of {target.name}; name the right ones as {TAPS} in its config.json"
    )


def _what(module: Eagle1 | Eagle3, published: Mapping[str, Any]) -> list[str]:
    c = module.settings
    layers = "one layer" if c.layers == 1 else f"{c.layers} layers"
    embedding = "an embedding of its own" if c.own_embedding else "the target's embedding"
    verifier = published.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    made_for = f" ({verifier})" if verifier else ""
    if isinstance(c, Eagle3Settings):
        newer = c.norm_output or c.fc_norm or c.norm_before_fc
        layout = "speculators" if is_speculators(published) else "flat (SpecForge, SGLang)"
        name = f"an EAGLE-{'3.1' if newer else '3'} draft in {layout} layout"
        head = "the target's output head"
        if c.own_head:
            head = f"a head of its own over {c.draft_vocab_size} tokens"
        width = c.target_hidden_size
    else:
        name, head = "an EAGLE-1 draft (which EAGLE-2 uses, too)", "the target's output head"
        width = c.hidden_size
    return [
        f"{name}: {layers} of width {c.hidden_size}, {embedding} and {head}",
        f"for a target{made_for} of width {width} and {c.vocab_size} tokens",
    ]


def _conventions(module: Eagle1 | Eagle3, published: Mapping[str, Any]) -> list[str]:
    c = module.settings
    scaling = (c.rope_scaling or {}).get("rope_type", "unscaled")
    said = [f"rotary base {c.rope_theta:g}, {scaling}; made for {c.max_length} positions"]
    if c.sliding_window:
        said.append(f"each row sees the last {c.sliding_window} tokens")
    if not isinstance(c, Eagle3Settings):
        return ["it reads the target's last states behind the final norm", *said]
    names = ", ".join(map(str, c.taps)) if c.taps else "2, N // 2 and N - 3 of N (none are named)"
    flags = [flag for flag in FLAGS if getattr(c, flag)]
    return [
        f"it reads the target before layers {names}",
        f"norm flags on: {', '.join(flags) or 'none'}",
        *said,
    ]


def _questions(
    settings: EagleSettings, published: Mapping[str, Any], target: TargetInfo | None
) -> Iterator[str]:
    """What trying it on a target answers."""
    base, layer = settings.rope_theta, layer_config(published)
    if not (layer.get("rope_theta") or layer.get("rope_parameters")):
        yield "config.json names no rotary base: 10000 is taken, as it is trained with by default"
    elif base != 10_000 and not is_speculators(published):
        yield (
            f"SafeAILab's trainer ignores rope_theta: if it was trained there, 10000 may draft "
            f"better than {base:g}"
        )
    if target and target.rope_base not in (None, base):
        yield f"its rotary base is {base:g}, that of {target.name} {target.rope_base:g}"
    if not isinstance(settings, Eagle3Settings):
        return
    if not settings.taps:
        yield "config.json names no layers to read: the usual ones are taken"
    if settings.norm_output and not is_speculators(published):
        yield (
            "norm_output is true: what is fed back has been normalised (EAGLE-3.1); SpecForge "
            "before August 2026 wrote true for plain EAGLE-3, too: if it drafts badly, set false"
        )


def _doubts(module: Eagle1 | Eagle3, published: Mapping[str, Any]) -> list[str]:
    c = module.settings
    doubts = []
    if isinstance(c, Eagle3Settings):
        doubts += _eagle3_doubts(c, published)
    if module.embed_tokens is not None and _looks_random(module.embed_tokens.weight):
        doubts.append(
            "its embedding looks random: all rows are equally long; remove embed_tokens.weight "
            "to use the target's"
        )
    for name, tensor in module.named_parameters():
        if not tensor.isfinite().all():
            doubts.append(f"{name} holds numbers that are not finite")
    return doubts


def _eagle3_doubts(settings: Eagle3Settings, published: Mapping[str, Any]) -> list[str]:
    doubts = []
    nested = (published.get("eagle_config") or {}).get(TAPS)
    if nested and not published.get(TAPS):
        assert settings.taps
        doubts.append(
            f"the layers {nested} in eagle_config mean other states in vLLM, SGLang and SpecForge; "
            f"here they are read before layers {', '.join(map(str, settings.taps))}: write those "
            f"as {TAPS} at the top of config.json to settle it"
        )
    if is_speculators(published) and "norm_before_residual" not in published:
        doubts.append(
            "norm_before_residual is not stated: false is taken, as speculators does; vLLM would "
            "take true"
        )
    for flag in ("fc_norm", "norm_before_fc"):
        stated = (published.get("eagle_config") or {}).get(flag, published.get(flag))
        if stated is None and getattr(settings, flag):
            doubts.append(f"{flag} is not stated, but its tensors are there: it is taken to be on")
    if is_speculators(published) and not settings.own_embedding:
        doubts.append(
            "it has no embed_tokens.weight: the speculators package (0.9) would run it with "
            "whatever lies in memory; vLLM takes the target's, as forerun does"
        )
    if published.get("tie_word_embeddings"):
        doubts.append(
            "tie_word_embeddings is true: SGLang would use the embedding as the output matrix"
        )
    return doubts


def _looks_random(table_VC: Tensor) -> bool:
    """Freshly drawn rows have nearly the same length; what training leaves does not."""
    lengths_V = table_VC.float().norm(dim=1)
    expected = (2 * table_VC.shape[1]) ** -0.5  # spread over mean, for normal numbers
    return bool(lengths_V.std() < 1.5 * expected * lengths_V.mean())
