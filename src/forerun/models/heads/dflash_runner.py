"""A DFlash draft as it drafts: the network of `dflash.py`, fused, with its keys and values.

R rows of a pass, N of them that draft, T taps of width E, C hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.cache import KVStore
from forerun.models.compiled import Compiled
from forerun.models.heads.dflash import DFlash
from forerun.models.heads.dflash_round import Blocks, DFlashRounds
from forerun.models.heads.fused import (
    draft_backend,
    draft_rope,
    fused,
    fused_layer,
    norm_weight,
    required,
)
from forerun.models.heads.rounds import lent_head
from forerun.models.packing import Packed
from forerun.models.target import OpenTarget


class DFlashRunner:
    """Passes over the context tokens and the blocks of many requests.

    The network itself is not kept: it was laid out anew. store: the keys and values of the context,
    `slots` tokens of it; blocks are computed in the slots behind. ids_U: the target's ids of the
    draft's tokens where they differ. rounds: in one call each, where they can be had.
    """

    def __init__(self, network: DFlash, target: OpenTarget, slots: int) -> None:
        self.config = c = network.config
        dtype, device = target.info.dtype, target.info.device
        network = network.to(device, dtype)
        self._target = target
        features = len(c.taps) * c.target_hidden_size
        self._backend = backend = draft_backend(c, c.layers, dtype, device, features)
        self.store = KVStore(c.layers, c.kv_heads, c.head_dim, slots, dtype, device)
        self.ids_U = network.token_ids
        self._embedding_VC = network.embed_tokens.weight.data if c.own_embedding else None
        self._mask_C = network.mask_embedding.data if c.own_mask_embedding else None
        self._fc = fused(backend, network.fc)
        self._context_norm_C = required(norm_weight(network.hidden_norm))
        self._last_norm_C = required(norm_weight(network.norm))
        self._head = None if c.draft_vocab_size is None else fused(backend, network.lm_head)
        rope = draft_rope(c, device)
        layers = cast("Iterable[Any]", network.layers)
        self._layers = [
            fused_layer(
                backend,
                index,
                layer.self_attn,
                layer.mlp,
                layer.input_layernorm,
                layer.post_attention_layernorm,
                rope,
                window=rule.window,
                both_ways=not rule.causal,
                anchored=c.window_from_anchor,
            )
            for index, (layer, rule) in enumerate(zip(layers, c.attention, strict=True))
        ]

        self.rounds = self._compiled_rounds()

    def _compiled_rounds(self) -> DFlashRounds | None:
        """Not for the few drafts that scale or cap what goes in and out."""
        c, own = self.config, self._embedding_VC
        head = lent_head(self._target) if self._head is None else self._head
        as_it_is = c.embedding_scale == c.logit_scale == 1 and c.logit_softcap is None
        if not isinstance(self._backend, Compiled) or head is None or not as_it_is:
            return None
        embedding_VC = self._target.embedding_VC if own is None else own
        blocks = Blocks(
            self._layers,
            embedding_VC,
            embedding_VC[c.mask_token] if self._mask_C is None else self._mask_C,
            self._fc,
            head,
            self._context_norm_C,
            self._last_norm_C,
            c.first_slot,
            self.ids_U,
        )
        return DFlashRounds(self._backend, self.store, blocks)

    def append(self, packed: Packed, taps_RTE: Tensor) -> None:
        """Put the keys and values of context tokens into the store; see `DFlash.context_kv`."""
        self._backend.begin(packed, self.store)
        fused_RC = self._backend.linear(taps_RTE.flatten(1), self._fc)
        self._backend.append(self._backend.norm(fused_RC, self._context_norm_C), self._layers)

    def logits(self, packed: Packed) -> Tensor:
        """Of the rows of blocks that want them, [N, U], float32. Nothing in the store is changed
        but the slots behind what is committed."""
        self._backend.begin(packed, self.store)
        hidden_RC = self._backend.run(self._embed(packed.tokens), self._layers)
        first, last = packed.wanted[0], packed.wanted[-1]
        unbroken = last - first == len(packed.wanted) - 1
        hidden_NC = hidden_RC[first : last + 1] if unbroken else hidden_RC[packed.wanted]
        if self._head is None:
            normed_NC = self._backend.norm(hidden_NC, self._last_norm_C)
            logits_NU = self._target.head_logits(normed_NC)
        else:
            logits_NU = self._backend.logits(hidden_NC, self._last_norm_C, self._head)
        return self.config.finished(logits_NU)

    def _embed(self, tokens: list[int]) -> Tensor:
        """See `DFlash.embed`."""
        tokens_R = torch.tensor(tokens, device=self._target.info.device)
        if self._embedding_VC is None:
            rows_RC = self._target.embed(tokens_R, scaled=False)
        else:
            rows_RC = functional.embedding(tokens_R, self._embedding_VC)
        if self._mask_C is not None:
            masks_R1 = (tokens_R == self.config.mask_token)[:, None]
            rows_RC = torch.where(masks_R1, self._mask_C, rows_RC)
        scale = self.config.embedding_scale
        return rows_RC if scale == 1 else rows_RC * scale
