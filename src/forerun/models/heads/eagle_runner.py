"""An EAGLE draft as it drafts: the network of `eagle.py`, fused, with its keys and values.

R rows of a pass, N rows without order, C hidden size, F features per row, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.cache import KVStore
from forerun.models.compiled import Compiled
from forerun.models.heads.eagle import Eagle1, Eagle3, EagleDraft
from forerun.models.heads.eagle_round import EagleRounds, Network
from forerun.models.heads.fused import (
    draft_backend,
    draft_rope,
    fused,
    fused_layer,
    norm_weight,
)
from forerun.models.heads.rounds import lent_head
from forerun.models.layers import Backend, Layer
from forerun.models.packing import Packed
from forerun.models.rope import Rope
from forerun.models.target import OpenTarget
from forerun.models.topk import best


class EagleRunner:
    """Passes over the rows of many requests.

    The network itself is not kept: what is needed of it was laid out anew. store: its keys and
    values, `slots` tokens of them. ids_U: the target's ids of the draft's tokens where they differ.
    rounds: in one call each, where they can be had.
    """

    def __init__(self, network: EagleDraft, target: OpenTarget, slots: int) -> None:
        assert isinstance(network, Eagle1 | Eagle3)
        self.settings = c = network.settings
        self._target = target
        dtype, device = target.info.dtype, target.info.device
        network = network.to(device, dtype)
        backend = draft_backend(c, c.layers, dtype, device, target.info.hidden_size)
        self._backend = backend
        self.store = KVStore(c.layers, c.kv_heads, c.head_dim, slots, dtype, device)
        self.ids_U: Tensor | None = None
        if network.d2t is not None:
            self.ids_U = network.target_ids(torch.arange(len(network.d2t), device=device))
        self._ids: list[int] | None = None if self.ids_U is None else self.ids_U.tolist()
        own = network.embed_tokens
        self._embedding_VC = None if own is None else own.weight.data
        self._head = None if network.lm_head is None else fused(backend, network.lm_head)
        self._fc = fused(backend, network.fc)
        self._layers = _layers(backend, network, draft_rope(c, device))
        self._feature_norms: list[Tensor] = []
        self._last_norm_C: Tensor | None = None
        self._norm_output = self._reads_beside = False
        if isinstance(network, Eagle3):
            norms = network.fc_norm or [network.input_norm]
            weights = (norm_weight(norm) for norm in norms)
            self._feature_norms = [weight_C for weight_C in weights if weight_C is not None]
            self._last_norm_C = norm_weight(network.norm)
            self._norm_output = network.settings.norm_output
            self._reads_beside = True
        self.rounds = self._compiled_rounds()

    def _compiled_rounds(self) -> EagleRounds | None:
        own = self._embedding_VC
        norms, eps = self._feature_norms, self.settings.norm_eps
        if not self._reads_beside and isinstance(self._target.backend, Compiled):
            norms, eps = [self._target.final_norm_C], self._target.backend.config.norm_eps
        head = lent_head(self._target) if self._head is None else self._head
        if not isinstance(self._backend, Compiled) or head is None:
            return None
        network = Network(
            self._layers,
            self._target.embedding_VC if own is None else own,
            self._fc,
            head,
            norms,
            self._last_norm_C,
            eps,
            self._norm_output,
            not self._reads_beside,
            self.ids_U,
        )
        return EagleRounds(self._backend, self.store, network)

    def new_state(self) -> Tensor:
        """Room for what a row hands on, [1, C]."""
        info = self._target.info
        return torch.empty(1, self.settings.hidden_size, dtype=info.dtype, device=info.device)

    def fuse(self, features_NF: Tensor) -> Tensor:
        """From states of the target, side by side, to those that rows are fed; [N, C]."""
        if not self._reads_beside:
            return self._target.final_norm(features_NF)
        if norms := self._feature_norms:
            parts = (part.contiguous() for part in features_NF.chunk(len(norms), -1))
            normed = [self._backend.norm(*pair) for pair in zip(parts, norms, strict=True)]
            features_NF = normed[0] if len(normed) == 1 else torch.cat(normed, -1)
        return self._backend.linear(features_NF, self._fc)

    def run(self, packed: Packed, hidden_RC: Tensor) -> Tensor:
        """The states that rows behind these are fed, [R, C]; hidden_RC is written over."""
        self._backend.begin(packed, self.store)
        embedded_RC = self._embed(torch.tensor(packed.tokens, device=hidden_RC.device))
        if self._reads_beside:
            hidden_RC = self._backend.run(hidden_RC, self._layers, embedded_RC)
        else:
            both_RX = torch.cat((embedded_RC, hidden_RC), -1)
            hidden_RC = self._backend.run(self._backend.linear(both_RX, self._fc), self._layers)
        if self._norm_output and self._last_norm_C is not None:
            hidden_RC = self._backend.norm(hidden_RC, self._last_norm_C)
        return hidden_RC

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Of the draft's tokens behind rows that gave these states, [N, U], float32."""
        norm_C = None if self._norm_output else self._last_norm_C
        if self._head is not None:
            return self._backend.logits(hidden_NC, norm_C, self._head)
        if norm_C is not None:
            hidden_NC = self._backend.norm(hidden_NC, norm_C)
        return self._target.head_logits(hidden_NC)

    def rank(self, hidden_NC: Tensor, top_k: int) -> tuple[list[list[int]], list[list[float]]]:
        """The target's ids of the `top_k` likeliest tokens behind rows that gave these states, best
        first, and how likely they are."""
        if self._head is None:
            columns_NK, shares_NK = best(self.logits(hidden_NC), top_k)
            return columns_NK.tolist(), shares_NK.tolist()
        norm_C = None if self._norm_output else self._last_norm_C
        columns, shares = self._backend.rank(hidden_NC, norm_C, self._head, top_k)
        if (ids := self._ids) is not None:
            columns = [[ids[column] for column in row] for row in columns]
        return columns, shares

    def _embed(self, tokens_R: Tensor) -> Tensor:
        if self._embedding_VC is None:
            return self._target.embed(tokens_R, scaled=False)
        return functional.embedding(tokens_R, self._embedding_VC)


def _layers(backend: Backend, network: Eagle1 | Eagle3, rope: Rope) -> list[Layer]:
    layers = []
    for index, layer in enumerate(cast("Iterable[Any]", network.layers)):
        before_attention = layer.input_layernorm
        flags: dict[str, Any] = {}
        if index == 0 and isinstance(network, Eagle3):
            before_attention = layer.hidden_norm
            flags["beside_C"] = norm_weight(layer.input_layernorm)
            flags["normed_residual"] = network.settings.norm_before_residual
        layers.append(
            fused_layer(
                backend,
                index,
                layer.self_attn,
                layer.mlp,
                before_attention,
                layer.post_attention_layernorm,
                rope,
                window=network.settings.sliding_window or 0,
                **flags,
            )
        )
    return layers
