"""Medusa heads (Cai et al. 2024, arXiv 2401.10774, section 2.1.1): guesses from one hidden state.

    h                          the target's last hidden state, behind its final norm
    r = h, then per block      r = r + SiLU(W r + b)
    logits of head k           U r: of the token k + 2 places behind the one that h belongs to

No head sees what another proposes. Published heads have an output matrix U each; later ones share
the target's own head, and vLLM's also a single matrix of their own.

N rows, K heads, C hidden size, U tokens that logits are given of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from forerun.config import Settings
from forerun.models.heads.layers import Size


class MedusaConfig(Settings):
    """The numbers of a set of heads.

    output: where logits come from: a matrix of `each` head, `one` for all, or the `target`'s head.
    vocab_size: of the target; not known where its head is used.
    draft_vocab_size: rows of the matrices where they cover a part of the vocabulary.
    base_model: what the heads were trained for, as their checkpoint names it.
    own_backbone: trained together with the model in the same folder, and of no use for another.
    """

    hidden_size: Size
    heads: Size
    layers: Annotated[int, Field(ge=0)] = 1
    bias: bool = True
    output: Literal["each", "one", "target"] = "each"
    vocab_size: Size | None = None
    draft_vocab_size: Size | None = None
    base_model: str | None = None
    own_backbone: bool = False


class Block(nn.Module):
    """The residual layers of one head. A fresh one changes nothing."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=config.bias) for _ in range(config.layers)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_NC: Tensor) -> Tensor:
        for layer in self.layers:
            x_NC = x_NC + functional.silu(layer(x_NC))
        return x_NC


class MedusaHeads(nn.Module):
    """Tensor names are those of vLLM: blocks.K.layers.J, lm_heads.K, token_map."""

    token_map: Tensor | None  # [U]: the target's id of each draft id

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        matrices = {"each": config.heads, "one": 1, "target": 0}[config.output]
        rows = config.draft_vocab_size or config.vocab_size
        assert rows or not matrices, "output matrices need a vocabulary"
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, rows or 0, bias=False) for _ in range(matrices)
        )
        reduced = config.draft_vocab_size
        self.register_buffer("token_map", None if reduced is None else torch.arange(reduced))

    def forward(
        self, normed_NC: Tensor, target_head: Callable[[Tensor], Tensor], heads: int | None = None
    ) -> Tensor:
        """Logits [N, K, U] of the first `heads` heads, float32 if those of the target are.

        normed_NC: states behind the target's final norm. target_head: from such states to logits.
        """
        blocks = list(self.blocks)[:heads]
        states_KNC = torch.stack([block(normed_NC) for block in blocks])
        logits_KNU: Tensor
        if self.config.output == "target":
            logits_KNU = target_head(states_KNC.flatten(0, 1)).unflatten(0, states_KNC.shape[:2])
        elif self.config.output == "one":
            logits_KNU = self.lm_heads[0](states_KNC).float()
        else:
            both = zip(self.lm_heads, states_KNC, strict=False)
            logits_KNU = torch.stack([head(x_NC) for head, x_NC in both]).float()
        return logits_KNU.transpose(0, 1)
