"""Medusa heads as they draft: the network of `medusa.py`, fused.

N rows, K heads, C hidden size, U tokens that logits are given of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from forerun.models.compiled import Compiled
from forerun.models.heads.fused import fused
from forerun.models.heads.medusa import Block, MedusaHeads
from forerun.models.heads.medusa_round import Heads, MedusaRounds
from forerun.models.heads.rounds import lent_head
from forerun.models.target import OpenTarget


class MedusaRunner:
    """The first `count` heads of a set. The network itself is not kept: it was laid out anew.

    ids_U: the target's ids of the heads' tokens where they differ. rounds: in one call
    each, where they can be had.
    """

    def __init__(self, network: MedusaHeads, target: OpenTarget, count: int) -> None:
        network = network.to(target.info.device, target.info.dtype)
        self._target, self._backend = target, target.backend
        self._output = network.config.output
        self.ids_U = network.token_map
        blocks = cast("list[Block]", list(network.blocks)[:count])
        layers = [
            _linears(layer) for layer in zip(*(block.layers for block in blocks), strict=True)
        ]
        # All heads read the same state, so their first layers are one product.
        self._first = fused(self._backend, *layers[0]) if layers else None
        self._others = [[fused(self._backend, linear) for linear in layer] for layer in layers[1:]]
        heads = _linears(list(network.lm_heads)[:count])
        self._heads = [fused(self._backend, head) for head in heads]
        self._count = count
        self.rounds = self._compiled_rounds()

    def _compiled_rounds(self) -> MedusaRounds | None:
        outputs, lent = self._heads, lent_head(self._target)
        if not outputs and lent is not None:
            outputs = [lent]
        if not isinstance(self._backend, Compiled) or not outputs:
            return None
        norm_C = self._target.final_norm_C
        heads = Heads(self._count, norm_C, self._first, self._others, outputs, self.ids_U)
        return MedusaRounds(self._backend, heads)

    def logits(self, hidden_NC: Tensor, heads: int) -> Tensor:
        """[N, K, U], float32, of the first `heads` heads.

        hidden_NC: the target's last hidden states, before its final norm.
        """
        states_KNC = self._states(self._target.final_norm(hidden_NC))[:heads]
        shape = states_KNC.shape[:2]
        if self._output == "each":
            both = zip(states_KNC, self._heads, strict=False)
            logits_KNU = torch.stack([self._backend.logits(x_NC, None, m) for x_NC, m in both])
        elif self._output == "one":
            (head,) = self._heads
            flat_MU = self._backend.logits(states_KNC.flatten(0, 1), None, head)
            logits_KNU = flat_MU.unflatten(0, shape)
        else:
            logits_KNU = self._target.head_logits(states_KNC.flatten(0, 1)).unflatten(0, shape)
        return logits_KNU.transpose(0, 1)

    def _states(self, normed_NC: Tensor) -> Tensor:
        """What each head's output matrix reads, [K, N, C]."""
        if self._first is None:
            return normed_NC.expand(self._count, -1, -1).contiguous()
        first_NX = self._backend.linear(normed_NC, self._first)
        states = [
            self._backend.add_silu(normed_NC, first_NC)
            for first_NC in first_NX.chunk(self._count, 1)
        ]
        for layer in self._others:
            added = [self._backend.linear(*pair) for pair in zip(states, layer, strict=True)]
            states = [self._backend.add_silu(*pair) for pair in zip(states, added, strict=True)]
        return torch.stack(states)


def _linears(modules: Sequence[nn.Module]) -> list[nn.Linear]:
    return cast("list[nn.Linear]", list(modules))
