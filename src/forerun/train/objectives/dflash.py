"""DFlash (Chen et al. 2026, arXiv 2602.06036, sections 3 and 4): blocks behind random anchors.

    tokens          t0  t1  t2  t3  t4  t5  t6  t7
    a block at 2            t2  M   M                 M: mask token; slots at positions 2, 3, 4
    sees            t0  t1                            and its own slots: the state of the anchor is
                                                      not known when the block is drafted
    in place                    t3  t4                what the slots are taught
    anchor first            t3  t4  t5

A blocks lie side by side in each of B sequences, each of W slots, D of which draft. R rows of a
sequence, N slots that are taught, C hidden size, U tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from forerun.config import Settings
from forerun.errors import ConfigError
from forerun.interop import dflash as checkpoint
from forerun.interop.layer_numbers import layer_numbers
from forerun.models.architecture import DecoderConfig
from forerun.models.heads.dflash import DFlash, DFlashConfig, LayerAttention, default_taps
from forerun.models.heads.layers import Size
from forerun.models.hub import LoadedModel
from forerun.models.tokenizer import Tokenizer
from forerun.train.capture import Batch
from forerun.train.losses import RowLosses, hard_cross_entropy, soft_cross_entropy
from forerun.train.objectives.base import Loss, Objective, compute_dtype
from forerun.train.objectives.blocks import Blocks, dpace, draw_anchors, taught
from forerun.train.source import Source, source
from forerun.train.vocabulary import Vocabulary

TAPS = 5
SMALL = 0.1  # weights for what is hardly looked at in the beginning, over 1 / sqrt(width)


class DFlashSettings(Settings):
    """block: slots, the anchor's included. anchor_first: which slots draft (see `DFlashConfig`).
    layers: one for every twelve of the target unless given. taps: boundaries that are read.
    mask_token: an id that no text contains; by default one that the tokenizer keeps in reserve.

    anchors: blocks per sequence and step. labels: `soft` teaches the target's law, `hard` the token
    that follows.
    weights: of a slot: `dpace` by how likely the drafts up to it and behind it are right, `decay`
    by exp(-2 slot / block).
    """

    title = "dflash"

    block: Annotated[int, Field(ge=2)] = 8
    anchor_first: bool = False
    layers: Size | None = None
    taps: tuple[int, ...] | None = None
    mask_token: Annotated[int, Field(ge=0)] | None = None
    anchors: Size = 64
    labels: Literal["soft", "hard"] = "soft"
    weights: Literal["dpace", "decay"] = "dpace"


class DFlashObjective(Objective):
    """Trains the layers and what fuses the taps; embedding and output rows are the target's."""

    name = "dflash"
    settings = DFlashSettings
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 2e-3}

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        vocabulary: Vocabulary,
        generator: torch.Generator,
    ) -> None:
        super().__init__(settings, model, vocabulary, generator)
        assert isinstance(settings, DFlashSettings)
        self._s = settings
        begin = source(model)
        mask_token = settings.mask_token
        if mask_token is None:
            mask_token = reserved_token(model.tokenizer, begin.numbers.vocab_size, model.stop_ids)
        self._config = draft_config(settings, begin.numbers, vocabulary, mask_token)
        self.taps, self.ahead = self._config.taps, self._config.drafts
        device = self.target.info.device
        self.network: DFlash = start(self._config, begin, generator).to(device)
        if vocabulary.reduced:
            self.network.lm_head.weight.requires_grad_(False).copy_(self._teacher_head.weight_UC)
            self.network.d2t = vocabulary.d2t_U.to(device)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Anchors are drawn anew."""
        s, drafts = self._s, self._config.drafts
        anchors_BA, used_BA = draw_anchors(batch, s.anchors, s.anchor_first, generator)
        row_BAD, taught_BAD = taught(batch, anchors_BA, drafts)
        taught_BAD &= used_BA[..., None]
        hidden_NC = self.slots(batch, anchors_BA)[taught_BAD].to(self._teacher_head.weight_UC.dtype)
        sequence_N, _, slot_N = taught_BAD.nonzero(as_tuple=True)
        row_N = row_BAD[taught_BAD]
        labels_N = self._known_V[batch.tokens_BR[sequence_N, row_N]]
        teacher_NC = batch.final_BRC[sequence_N, row_N - 1].to(hidden_NC.dtype)
        total, weights_N, rows = self._weighted(hidden_NC, teacher_NC, labels_N, taught_BAD)
        count = weights_N.sum()
        zeros_D = torch.zeros(drafts, device=count.device)
        return Loss(
            total=total / count.clamp(min=1e-6),
            count=count,
            loss_P=zeros_D.index_add(0, slot_N, rows.loss_SN[0] * (weights_N > 0)),
            hits_P=zeros_D.index_add(0, slot_N, rows.hits_SN[0].float()),
            rows_P=taught_BAD.sum((0, 1)),
        )

    def _weighted(
        self, hidden_NC: Tensor, teacher_NC: Tensor, labels_N: Tensor, taught_BAD: Tensor
    ) -> tuple[Tensor, Tensor, RowLosses]:
        """The weighted sum of the losses of all slots, with a gradient; weights [N]; the losses.

        Weights by D-PACE follow from the losses, so the gradient is found first and weighted then.
        """
        leaf_NC = hidden_NC.detach().requires_grad_()
        rows = self._row_losses(leaf_NC, teacher_NC, labels_N)
        (gradient_NC,) = torch.autograd.grad(rows.total, leaf_NC)
        learned_N = (labels_N >= 0) | (self._s.labels == "soft")
        loss_N = rows.loss_SN[0]
        weights_N = self._weights(torch.exp(-loss_N) * learned_N, taught_BAD) * learned_N
        linear = (hidden_NC * gradient_NC * weights_N[:, None]).sum()
        return linear - linear.detach() + (loss_N * weights_N).sum(), weights_N, rows

    def slots(self, batch: Batch, anchors_BA: Tensor) -> Tensor:
        """States of the drafting slots behind the final norm, [B, A, D, C]."""
        network, config = self.network, self._config
        width, dtype = config.block_size, compute_dtype(anchors_BA.device)
        rows = batch.tokens_BR.shape[1]
        context_BR = torch.arange(rows, device=anchors_BA.device).expand(len(anchors_BA), -1)
        positions_BAW = anchors_BA[..., None] + torch.arange(width, device=anchors_BA.device)
        tokens_BAW = torch.full_like(positions_BAW, config.mask_token)
        tokens_BAW[..., 0] = batch.tokens_BR.gather(1, anchors_BA)
        embedded_NC = self.target.embed(tokens_BAW.flatten(), scaled=False)
        memory = Blocks(network.context_kv(batch.taps_BRTC, context_BR), anchors_BA)
        hidden_BQC = network(
            embedded_NC.view(len(anchors_BA), -1, config.hidden_size).to(dtype),
            positions_BAW.flatten(1),
            memory,
        )
        hidden_BADC: Tensor = hidden_BQC.unflatten(1, (-1, width))[:, :, config.first_slot :]
        return hidden_BADC

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        network = DFlash(self._config)
        network.load_state_dict(dict(weights))
        checkpoint.export(
            network.to(self.target.info.dtype), _layout(self._config), folder, self.model.name
        )

    def spec(self, folder: Path) -> str:
        return f"dflash:{folder}"

    def _row_losses(self, states_NC: Tensor, teacher_NC: Tensor, labels_N: Tensor) -> RowLosses:
        states_1NC = states_NC[None]
        if self._s.labels == "soft":
            even_1N = torch.ones(1, len(labels_N), device=labels_N.device)
            return soft_cross_entropy(
                states_1NC, self._teacher_head, teacher_NC, self._teacher_head, even_1N, labels_N
            )
        return hard_cross_entropy(
            states_1NC, self._teacher_head, (labels_N >= 0)[None].float(), labels_N
        )

    def _weights(self, right_N: Tensor, taught_BAD: Tensor) -> Tensor:
        """Of the taught slots, [N]. right_N: how likely they are right."""
        if self._s.weights == "decay":
            slot_D = torch.arange(taught_BAD.shape[-1], device=right_N.device)
            decay_D = torch.exp(-2 * slot_D / self._s.block)
            return decay_D.expand_as(taught_BAD)[taught_BAD]
        right_BAD = torch.zeros(taught_BAD.shape, device=right_N.device)
        right_BAD[taught_BAD] = right_N
        return dpace(right_BAD, taught_BAD)[taught_BAD]


def draft_config(
    settings: DFlashSettings, numbers: DecoderConfig, vocabulary: Vocabulary, mask_token: int
) -> DFlashConfig:
    """A draft with layers like the target's, as far as the settings leave it open.

    Raises `ConfigError` for taps or a mask token that the target does not have.
    """
    layers = settings.layers or max(2, min(5, numbers.layers // 12))
    return DFlashConfig(
        **layer_numbers(numbers)
        | {
            "layers": layers,
            "target_hidden_size": numbers.hidden_size,
            "target_layers": numbers.layers,
            "taps": settings.taps or spread_taps(numbers.layers),
            "block_size": settings.block,
            "mask_token": mask_token,
            "anchor_first": settings.anchor_first,
            "attention": (LayerAttention(),) * layers,
            "draft_vocab_size": len(vocabulary) if vocabulary.reduced else None,
        }
    )


def spread_taps(layers: int) -> tuple[int, ...]:
    """Boundaries to read of a target: the published ones, or all but the embedding's if few."""
    if layers < TAPS + 3:
        return tuple(range(1, layers + 1))
    return default_taps(layers, TAPS)


def reserved_token(tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> int:
    """A token that no conversation contains: the last special one that nothing refers to, else a
    row of the embedding that stands for no token.

    Raises `ConfigError` where there is neither.
    """
    template = tokenizer.chat_template.source if tokenizer.chat_template else ""
    named = set(tokenizer.special_tokens.values())
    free = [
        token
        for token, added in tokenizer.backend.get_added_tokens_decoder().items()
        if added.special
        and added.content not in named
        and added.content not in template
        and token not in stop_ids
    ]
    if free:
        return max(free)
    if tokenizer.vocab_size < vocab_size:
        return vocab_size - 1
    raise ConfigError(
        "the tokenizer keeps no token in reserve that could mark the slots of a block; name one "
        "that your texts never contain with mask_token"
    )


def start(config: DFlashConfig, begin: Source, generator: torch.Generator) -> DFlash:
    """A network in float32 with the last layers of the target, which is fed the last tap and, at
    first, little of the others."""
    network = DFlash(config)
    width, last = config.target_hidden_size, len(config.taps) - 1
    fc_CF = network.fc.weight.data
    fc_CF.normal_(0, SMALL * fc_CF.shape[1] ** -0.5, generator=generator)
    fc_CF[:, last * width :] = torch.eye(width)
    for index in range(config.layers):
        own, name = (
            f"layers.{index}",
            f"model.layers.{begin.numbers.layers - config.layers + index}",
        )
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            begin.start_linear(network, f"{own}.self_attn.{part}", f"{name}.self_attn.{part}")
        for part in ("gate_proj", "up_proj", "down_proj"):
            begin.start_linear(network, f"{own}.mlp.{part}", f"{name}.mlp.{part}")
        begin.start_norm(network, f"{own}.input_layernorm", f"{name}.input_layernorm")
        begin.start_norm(network, f"{own}.post_attention_layernorm", f"{name}.{begin.before_mlp}")
        # vLLM 0.32 norms the context keys of all layers with the weight of layer 0. They stay equal
        # here; q_norm learns what both would.
        network.get_parameter(f"{own}.self_attn.k_norm.weight").requires_grad_(False)
    begin.start_norm(network, "hidden_norm", f"{begin.last_layer}.input_layernorm")
    begin.start_norm(network, "norm", "model.norm")
    return network


def _layout(config: DFlashConfig) -> str:
    return "speculators" if config.anchor_first else "vllm"
