"""Drafts of every family that know by heart what a tiny target says when one is tried on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.interop.eagle_trial import features_of
from forerun.interop.trial import Speech
from forerun.models.heads.attention import Joined
from forerun.models.heads.dflash import DFlash
from forerun.models.heads.eagle import Eagle1, Eagle3
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.hub import LoadedModel
from learned_dflash import _batch
from tiny_heads import tiny_dflash_module, tiny_eagle_module, tiny_medusa_module

UNROLLED = 4


def learn_eagle(
    target: LoadedModel,
    speeches: Sequence[Speech],
    kind: str = "eagle3",
    rounds: int = 60,
    **numbers: Any,
) -> Eagle1 | Eagle3:
    """Trained as EAGLE-3 is: unrolled over its own states (section 3 of the paper)."""
    module = tiny_eagle_module(target.target.info, kind, **numbers)
    _fit(module, [_unrolled(module, target, speech) for speech in speeches], rounds)
    return module


def _unrolled(module: Eagle1 | Eagle3, target: LoadedModel, speech: Speech) -> Callable[[], Tensor]:
    """The loss of drafting from every row of a text, several tokens far."""
    rows = len(speech.tokens) - UNROLLED
    tokens = torch.tensor(speech.tokens)
    features_RF = features_of(module, target.target, speech)[:rows].clone()  # type: ignore[arg-type]
    embed = target.target.embed  # type: ignore[attr-defined]
    head_VC = _head(target)
    causal_RR = torch.ones(rows, rows, dtype=torch.bool).tril()

    def loss() -> Tensor:
        memory, hidden = Joined(), module.fuse(features_RF[None])
        total = torch.zeros(())
        for level in range(UNROLLED):
            memory.mask_BRK = torch.cat(
                (causal_RR, *[torch.eye(rows, dtype=torch.bool)] * level), 1
            )[None]
            fed = tokens[level + 1 : level + 1 + rows]
            own = module.embed_tokens
            embedded = own(fed) if own else embed(fed, scaled=False).clone()
            positions = torch.arange(rows)[None] + level
            hidden = module(hidden, embedded[None], positions, memory)
            states = module.readout(hidden)[0]
            logits = module.lm_head(states) if module.lm_head else states @ head_VC.T
            labels = tokens[level + 2 : level + 2 + rows]
            total = total + functional.cross_entropy(logits[: len(labels)], labels)
        return total

    return loss


def learn_medusa(
    target: LoadedModel, model: Path, speeches: Sequence[Speech], rounds: int = 150, **numbers: Any
) -> MedusaHeads:
    """Heads for the Llama in a folder."""
    module = tiny_medusa_module(model, **numbers)
    lent: Any = target.target
    states_NC = torch.cat([lent.final_norm(s.taps_RBC[:-5, -1]) for s in speeches]).clone()
    labels = [
        torch.cat([torch.tensor(s.tokens)[2 + k : len(s.tokens) - 3 + k] for s in speeches])
        for k in range(module.config.heads)
    ]

    def loss() -> Tensor:
        logits_NKU = module(states_NC, lambda x_NC: x_NC @ _head(target).T)
        losses = [functional.cross_entropy(logits_NKU[:, k], said) for k, said in enumerate(labels)]
        return torch.stack(losses).sum()

    _fit(module, [loss], rounds)
    return module


def learn_dflash(
    target: LoadedModel, speeches: Sequence[Speech], rounds: int = 60, **numbers: Any
) -> DFlash:
    """Trained on blocks at every place of the texts."""
    module = tiny_dflash_module(target.target.info, block_size=4, **numbers)
    _fit(module, [_batch(target, module, list(speech.tokens)) for speech in speeches], rounds)
    return module


def _fit(module: nn.Module, losses: Sequence[Callable[[], Tensor]], rounds: int) -> None:
    module.requires_grad_(True)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(rounds):
        for loss in losses:
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()
    module.requires_grad_(False)


def _head(target: LoadedModel) -> Tensor:
    identity = torch.eye(target.target.info.hidden_size)
    return target.target.head_logits(identity).T.clone()  # type: ignore[attr-defined]
