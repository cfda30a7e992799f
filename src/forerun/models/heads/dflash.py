"""DFlash: a few layers that draft a block in one pass and read the target through their K and V.

Chen et al. 2026, arXiv 2602.06036. Taps of the target (hidden states at a few layer boundaries) are
fused into one context vector per token; every draft layer projects it to keys and values with the
same weights as its own. Queries come from the block alone: the last committed token (the anchor),
whose taps are not known yet, and mask tokens behind it.

    context      t0  t1  ...  t(s-1)                    keys and values, computed once per token
    block                             anchor  MASK  MASK  MASK     at positions s, s+1, s+2, s+3
    in place                                  s+1   s+2   s+3      what the slots predict
    anchor first                      s+1     s+2   s+3   s+4

A anchors, B sequences, Q slots, K context tokens, N rows; T taps of the target's hidden size E; C
hidden size, G kv heads, D head size, L layers, V vocabulary (U: the draft's, where it is smaller).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from forerun.config import Settings
from forerun.models.heads.attention import Attention, Memory, Rotary, Rotation, attend
from forerun.models.heads.layers import MLP, LayerSettings, RMSNorm, Size
from forerun.models.target import OpenTarget


class LayerAttention(Settings):
    """What the slots of a block see in one layer.

    window: positions, their own included; 0: all. causal: no slot sees those behind it.
    """

    window: Annotated[int, Field(ge=0)] = 0
    causal: bool = False


class DFlashConfig(LayerSettings):
    """Everything that makes one DFlash draft, whatever layout it was read from.

    taps: layer boundaries of the target as `Forward.taps_RTD` counts them, ascending.
    block_size: slots, the anchor's included. anchor_first: the anchor's slot predicts the token
    behind the anchor (B drafts); otherwise slot k predicts its own position (B - 1 drafts).
    window_from_anchor: windows end `window` tokens before the anchor (speculators) instead of
    moving along with the slot (everybody else).
    embedding_scale, logit_scale, logit_softcap: on the way in and out.
    draft_vocab_size: tokens that the draft's own head knows; None: the target's head is used.
    """

    qk_norm: bool = True
    vocab_size: Size
    layers: Size
    target_hidden_size: Size
    target_layers: Size | None = None
    taps: tuple[int, ...]
    block_size: Annotated[int, Field(ge=2)]
    mask_token: Annotated[int, Field(ge=0)]
    anchor_first: bool = False
    attention: tuple[LayerAttention, ...]
    window_from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    own_embedding: bool = False
    own_mask_embedding: bool = False
    draft_vocab_size: Size | None = None

    @model_validator(mode="after")
    def _fits(self) -> DFlashConfig:
        if not self.taps or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps {list(self.taps)} must be ascending layer boundaries")
        if self.target_layers is not None and self.taps[-1] > self.target_layers:
            raise ValueError(
                f"tap {self.taps[-1]} lies behind layer {self.target_layers}, the last"
            )
        if len(self.attention) != self.layers:
            raise ValueError(f"{len(self.attention)} attention rules for {self.layers} layers")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key heads")
        if self.mask_token >= self.vocab_size:
            raise ValueError(f"mask token {self.mask_token} is outside of the vocabulary")
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} is above {self.vocab_size}")
        return self

    @property
    def first_slot(self) -> int:
        """The first slot whose prediction is a draft."""
        return 0 if self.anchor_first else 1

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_slot

    @property
    def reduced(self) -> bool:
        """Whether the draft knows a part of the vocabulary only."""
        return self.draft_vocab_size not in (None, self.vocab_size)

    def finished(self, logits_NV: Tensor) -> Tensor:
        """Scaled and capped, as they leave the network."""
        if self.logit_scale != 1:
            logits_NV = logits_NV * self.logit_scale
        cap = self.logit_softcap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


class DFlash(nn.Module):
    """The network; parameters are named as z-lab publishes them.

    It holds no state of a sequence. Drafting calls `context_kv` for the new context tokens and
    keeps them in a memory, then `forward` for the block; training calls the same two, with many
    blocks of a sequence side by side (`visible` keeps them apart) and an `Injected` memory.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.own_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))
        if c.draft_vocab_size is not None:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.reduced:
            self.d2t: Tensor
            self.register_buffer("d2t", torch.zeros(c.draft_vocab_size or 0, dtype=torch.int64))
        self._rotary = Rotary(c)

    def context_kv(self, taps_BKTE: Tensor, positions_BK: Tensor) -> Tensor:
        """Keys (rotated) and values of context tokens in every layer, [L, 2, B, G, K, D]."""
        taps_BKF = taps_BKTE.flatten(-2).to(self.dtype)
        fused_BKC = self.hidden_norm(self.fc(taps_BKF))
        rotation = self._rotary(positions_BK)
        layers = cast("Iterable[_Layer]", self.layers)
        parts = [layer.self_attn.keys_values(fused_BKC, rotation) for layer in layers]
        return torch.stack([torch.stack(part) for part in parts])

    def forward(self, embedded_BQC: Tensor, positions_BQ: Tensor, memory: Memory) -> Tensor:
        """Hidden states of the slots behind the final norm, [B, Q, C].

        memory: holds the keys and values of the context, and says what each slot sees of them.
        """
        rotation = self._rotary(positions_BQ)
        x_BQC = embedded_BQC
        for index, layer in enumerate(self.layers):
            x_BQC = layer(x_BQC, rotation, memory, index)
        hidden_BQC: Tensor = self.norm(x_BQC)
        return hidden_BQC

    def visible(
        self, positions_BQ: Tensor, anchors_BQ: Tensor, context_positions_BK: Tensor
    ) -> list[Tensor]:
        """What the slots see of the context, then of the slots: bool [B, Q, K + Q] per layer.

        anchors_BQ: position of the anchor of each slot's block, which tells the blocks of a
        sequence apart. Of the context a slot sees what lies before its anchor: give absent tokens
        (padding) a position that no anchor reaches.
        """
        given = positions_BQ, anchors_BQ, context_positions_BK
        rules = {rule: self.sees(rule, *given) for rule in set(self.config.attention)}
        return [rules[rule] for rule in self.config.attention]

    def sees(
        self, rule: LayerAttention, positions_Q: Tensor, anchors_Q: Tensor, context_K: Tensor
    ) -> Tensor:
        """What the slots of one layer see, as in `visible`; further dimensions stand in front."""
        slots_Q1, anchors_Q1 = positions_Q[..., None], anchors_Q[..., None]
        context_1K, others_1Q = context_K[..., None, :], positions_Q[..., None, :]
        context_QK = context_1K < anchors_Q1
        block_QQ = anchors_Q1 == anchors_Q[..., None, :]
        if rule.causal:
            block_QQ = block_QQ & (others_1Q <= slots_Q1)
        if rule.window and self.config.window_from_anchor:
            context_QK = context_QK & (context_1K >= anchors_Q1 - rule.window)
        elif rule.window:
            context_QK = context_QK & (slots_Q1 - context_1K < rule.window)
            block_QQ = block_QQ & ((slots_Q1 - others_1Q).abs() < rule.window)
        return torch.cat([context_QK, block_QQ], dim=-1)

    def embed(self, tokens_N: Tensor, lent: Callable[[Tensor], Tensor]) -> Tensor:
        """What the block is fed, [N, C]. lent: rows of the target's embedding, unscaled."""
        rows_NC = self.embed_tokens(tokens_N) if self.config.own_embedding else lent(tokens_N)
        if self.config.own_mask_embedding:
            masks_N1 = (tokens_N == self.config.mask_token)[:, None]
            rows_NC = torch.where(masks_N1, self.mask_embedding, rows_NC)
        return rows_NC.to(self.dtype) * self.config.embedding_scale

    def logits(self, hidden_NC: Tensor, lent: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [N, V], or [N, U] with a head of its own. lent: the target's head."""
        own = self.config.draft_vocab_size is not None
        return self.config.finished((self.lm_head(hidden_NC) if own else lent(hidden_NC)).float())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of all states."""
        return self.hidden_norm.weight.dtype

    @property
    def token_ids(self) -> Tensor | None:
        """The target's ids of the draft's tokens, [U]; None where they are the same."""
        if not self.config.reduced:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class Injected:
    """A memory of context keys and values as `DFlash.context_kv` gives them; gradients run through.

    visible: as `DFlash.visible` gives it.
    """

    def __init__(self, context_kv: Tensor, visible: Sequence[Tensor]) -> None:
        self.context_kv, self.visible = context_kv, visible

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """See `Memory.attend`. What the pass adds ends with it."""
        keys_BGKD, values_BGKD = self.context_kv[layer]
        return attend(
            q_BHRD,
            torch.cat([keys_BGKD, keys_BGRD], 2),
            torch.cat([values_BGKD, values_BGRD], 2),
            self.visible[layer],
        )


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BQC: Tensor, rotation: Rotation, memory: Memory, index: int) -> Tensor:
        x_BQC = x_BQC + self.self_attn(self.input_layernorm(x_BQC), rotation, memory, index)
        y_BQC: Tensor = x_BQC + self.mlp(self.post_attention_layernorm(x_BQC))
        return y_BQC


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """The boundaries that published drafts of `count` layers read when they name none.

    Spread from behind the second layer to behind the last but two; halves are rounded to even.
    """
    if count == 1:
        return (target_layers // 2 + 1,)
    step = (target_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) + 1 for i in range(count))


@torch.inference_mode()
def said_behind(
    draft: DFlash, target: OpenTarget, tokens: Sequence[int], taps_KTE: Tensor, anchors_A: Tensor
) -> Tensor:
    """What each slot of a block behind each anchor of a text says, as the target's ids, [A, Q].

    All blocks are drafted in one pass. taps_KTE: of the text, at least up to the last anchor.
    """
    config, device = draft.config, taps_KTE.device
    anchors_A = anchors_A.to(device)
    positions_AQ = anchors_A[:, None] + torch.arange(config.block_size, device=device)
    tokens_AQ = torch.full_like(positions_AQ, config.mask_token)
    tokens_AQ[:, 0] = torch.tensor(tokens, device=device)[anchors_A]
    embedded_NC = draft.embed(tokens_AQ.flatten(), lambda ids: target.embed(ids, scaled=False))
    context_1K = torch.arange(len(taps_KTE), device=device)[None]
    positions_1N = positions_AQ.reshape(1, -1)
    anchors_1N = anchors_A[:, None].expand_as(positions_AQ).reshape(1, -1)
    memory = Injected(
        draft.context_kv(taps_KTE[None], context_1K),
        draft.visible(positions_1N, anchors_1N, context_1K),
    )
    hidden_NC = draft(embedded_NC[None], positions_1N, memory)[0]
    said_N = draft.logits(hidden_NC, target.head_logits).argmax(-1)
    if (ids_U := draft.token_ids) is not None:
        said_N = ids_U[said_N]
    return said_N.view_as(positions_AQ)
