"""The EAGLE drafts: a decoder layer that runs ahead on the target's hidden states.

Li et al. 2024, arXiv 2401.15077 (EAGLE-1; the network of EAGLE-2, 2406.16858, is the same) and
2025, arXiv 2503.01840 (EAGLE-3). Row t of the draft is fed what the target computed for token t and
the embedding of token t + 1, stands at position t and predicts token t + 2:

    token stream           x1   x2   ...  xn         xn: just chosen, not yet run by the target
    features               g0   g1   ...  g(n-1)
    rows                   r0   r1   ...  r(n-1) | drafted rows: fed the output of the row they
    predict                x2   x3   ...  x(n+1) | follow, and the token that it proposed

B sequences, R rows, C hidden size, F features per row, N rows without order, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from pydantic import model_validator
from torch import Tensor, nn

from forerun.models.heads.attention import Attention, Memory, Rotary, Rotation
from forerun.models.heads.decoder_layer import DecoderLayer
from forerun.models.heads.layers import MLP, LayerSettings, RMSNorm, Size


class EagleSettings(LayerSettings):
    """What all EAGLE drafts have. own_embedding: rows of its own, not those of the target."""

    layers: Size = 1
    vocab_size: Size  # of the target
    own_embedding: bool = False


class Eagle1Settings(EagleSettings):
    """EAGLE-1 and EAGLE-2. fc_bias: whether the fusing layer has a bias (old heads do)."""

    fc_bias: bool = True


class Eagle3Settings(EagleSettings):
    """EAGLE-3 and 3.1. K taps.

    target_hidden_size: width of a tap. taps: the K boundaries of the target that are read; None:
    behind the second layer, in the middle, and before the last three.
    draft_vocab_size: the tokens it can draft. own_head: it has its own output matrix; otherwise
    the target's is used.
    norm_before_residual: the residual is the normalised state, not the state itself.
    norm_before_fc: one norm over all taps; fc_norm: one for each. norm_output: the state that is
    fed back has been through the final norm.
    """

    target_hidden_size: Size
    taps: tuple[int, ...] | None = None
    tap_count: Size = 3
    draft_vocab_size: Size
    own_head: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Eagle3Settings:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other; keep one")
        if self.taps is not None and len(self.taps) != self.tap_count:
            raise ValueError(f"{len(self.taps)} taps are named, the weights read {self.tap_count}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("the draft's vocabulary is larger than the target's")
        if not self.own_head and self.draft_vocab_size != self.vocab_size:
            raise ValueError("a reduced vocabulary needs an output matrix of its own")
        return self

    @property
    def reduced(self) -> bool:
        """Whether it drafts a part of the vocabulary only."""
        return self.draft_vocab_size < self.vocab_size


class EagleDraft(nn.Module, ABC):
    """What drafting and training ask of any EAGLE network; tensors are named as published.

    embed_tokens and lm_head are None where the target's are used; d2t is None where draft ids are
    target ids.
    """

    settings: EagleSettings
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: Tensor | None

    def __init__(self, settings: EagleSettings) -> None:
        super().__init__()
        own = settings.own_embedding
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size) if own else None
        self.lm_head = None
        self.register_buffer("d2t", None)
        self._rotary = Rotary(settings)

    @abstractmethod
    def fuse(self, features_BRF: Tensor) -> Tensor:
        """From what the target computed to the states that rows are fed, [B, R, C]."""

    def forward(
        self, hidden_BRC: Tensor, embedded_BRC: Tensor, positions_BR: Tensor, memory: Memory
    ) -> Tensor:
        """The state that the next row is fed, [B, R, C].

        hidden_BRC: of the row before: from `fuse` or drafted. embedded_BRC: of the tokens behind.
        """
        rotation = self._rotary(positions_BR)
        return self._run(hidden_BRC, embedded_BRC, rotation, memory)

    @abstractmethod
    def _run(
        self, hidden_BRC: Tensor, embedded_BRC: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor: ...

    @abstractmethod
    def readout(self, hidden_BRC: Tensor) -> Tensor:
        """What the output matrix reads of the states that `forward` gave."""

    def target_ids(self, ids: Tensor) -> Tensor:
        """Draft ids as the target counts them."""
        return ids if self.d2t is None else ids + self.d2t[ids]


class Eagle1(EagleDraft):
    """Features are the target's last states behind its final norm; logits come from its head."""

    settings: Eagle1Settings

    def __init__(self, settings: Eagle1Settings) -> None:
        super().__init__(settings)
        self.settings = settings
        c = settings
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        # The first layer reads what fc gives as it is.
        self.layers = nn.ModuleList(DecoderLayer(c, normed=index > 0) for index in range(c.layers))

    def fuse(self, features_BRF: Tensor) -> Tensor:
        return features_BRF

    def _run(
        self, hidden_BRC: Tensor, embedded_BRC: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor:
        x_BRC: Tensor = self.fc(torch.cat((embedded_BRC, hidden_BRC), -1))
        for index, layer in enumerate(self.layers):
            x_BRC = layer(x_BRC, rotation, memory, index)
        return x_BRC

    def readout(self, hidden_BRC: Tensor) -> Tensor:
        return hidden_BRC


class Eagle3(EagleDraft):
    """Features are three (or `tap_count`) raw states of the target, side by side."""

    settings: Eagle3Settings

    def __init__(self, settings: Eagle3Settings) -> None:
        super().__init__(settings)
        self.settings = settings
        c = settings
        features = c.tap_count * c.target_hidden_size
        self.fc = nn.Linear(features, c.hidden_size, bias=False)
        self.input_norm = RMSNorm(features, c.norm_eps) if c.norm_before_fc else None
        norms = (RMSNorm(c.target_hidden_size, c.norm_eps) for _ in range(c.tap_count))
        self.fc_norm = nn.ModuleList(norms) if c.fc_norm else None
        more = (DecoderLayer(c, normed=True) for _ in range(1, c.layers))
        self.layers = nn.ModuleList([_Eagle3Layer(c), *more])
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        if c.own_head:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.reduced:
            self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    def fuse(self, features_BRF: Tensor) -> Tensor:
        if self.input_norm is not None:
            features_BRF = self.input_norm(features_BRF)
        if self.fc_norm is not None:
            parts = features_BRF.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_BRF = torch.cat(normed, -1)
        hidden_BRC: Tensor = self.fc(features_BRF)
        return hidden_BRC

    def _run(
        self, hidden_BRC: Tensor, embedded_BRC: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor:
        first, *more = self.layers
        x_BRC: Tensor = first(hidden_BRC, embedded_BRC, rotation, memory)
        for index, layer in enumerate(more, 1):
            x_BRC = layer(x_BRC, rotation, memory, index)
        return self.norm(x_BRC) if self.settings.norm_output else x_BRC

    def readout(self, hidden_BRC: Tensor) -> Tensor:
        return hidden_BRC if self.settings.norm_output else self.norm(hidden_BRC)


class _Eagle3Layer(nn.Module):
    """The first layer: attention reads embedding and state, the residual is the state alone."""

    def __init__(self, settings: Eagle3Settings) -> None:
        super().__init__()
        c = settings
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, input_size=2 * c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(
        self, hidden_BRC: Tensor, embedded_BRC: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor:
        normed_BRC = self.hidden_norm(hidden_BRC)
        both_BRX = torch.cat((self.input_layernorm(embedded_BRC), normed_BRC), -1)
        residual_BRC = normed_BRC if self.norm_before_residual else hidden_BRC
        x_BRC = residual_BRC + self.self_attn(both_BRX, rotation, memory, 0)
        y_BRC: Tensor = x_BRC + self.mlp(self.post_attention_layernorm(x_BRC))
        return y_BRC


def default_taps(layers: int) -> tuple[int, int, int]:
    """The boundaries that published EAGLE-3 drafts read when their config names none."""
    return 2, layers // 2, layers - 3
