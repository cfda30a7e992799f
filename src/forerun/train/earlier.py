"""Runs that begin with an earlier draft instead of the target's layers: more texts, more time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.interop import dflash, eagle, medusa, shipped
from forerun.models.heads.dflash import DFlash
from forerun.models.heads.eagle import Eagle3
from forerun.models.heads.medusa import MedusaHeads

READERS: Mapping[str, tuple[Callable[[Path, torch.dtype, str], nn.Module], type[nn.Module]]] = {
    "eagle3": (eagle.read, Eagle3),
    "dflash": (dflash.read, DFlash),
    "medusa": (medusa.read, MedusaHeads),
}
FREE = {"base_model", "draft_vocab_size"}  # settings in which the two may differ


def read(kind: str, name: str, target: str) -> nn.Module:
    """The network of a draft, float32. name: its path, or the model that one ships for.

    Raises `ConfigError` where the draft is of another kind, `CheckpointError` as its reader does.
    """
    if kind not in READERS:
        raise ConfigError(f"{kind} begins with the model itself; leave out start")
    reader, network = READERS[kind]
    found = reader(shipped.locate(kind, name), torch.float32, target)
    if not isinstance(found, network):
        raise ConfigError(f"{name} is no {kind} draft; start from one, or leave out start")
    return found


def proposed(network: nn.Module) -> Tensor | None:
    """The target's ids of the tokens that a draft may propose, [U]; None for all."""
    if isinstance(network, MedusaHeads):
        return network.token_map
    if isinstance(network, DFlash):
        return network.token_ids
    assert isinstance(network, Eagle3)
    return None if network.d2t is None else network.target_ids(torch.arange(len(network.d2t)))


def take_over(network: nn.Module, earlier: nn.Module, name: str) -> None:
    """Give a new network the numbers of an earlier one; it may propose more tokens, whose output
    rows it keeps. Raises `ConfigError` if it is built otherwise."""
    own, theirs = _settings(network), _settings(earlier)
    for setting, value in own.items():
        if theirs[setting] != value:
            raise ConfigError(
                f"{name} was made with {setting} {theirs[setting]}, the new draft has {value}; "
                "give the recipe that it was trained with"
            )
    numbers = earlier.state_dict()
    before_U, after_U = proposed(earlier), proposed(network)
    if before_U is not None and after_U is not None and len(before_U) < len(after_U):
        place_U = torch.searchsorted(after_U, before_U)
        for key, tensor in network.state_dict().items():
            if tensor.shape != numbers[key].shape:  # something of every token
                wider = tensor.clone()
                if tensor.is_floating_point():
                    wider[place_U] = numbers[key]
                numbers[key] = wider
    network.load_state_dict(numbers)


def _settings(network: nn.Module) -> dict[str, Any]:
    settings: Any = network.settings if isinstance(network, Eagle3) else network.config
    found: dict[str, Any] = settings.model_dump()
    return {name: value for name, value in found.items() if name not in FREE}
