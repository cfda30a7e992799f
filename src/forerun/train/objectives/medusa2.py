"""Medusa-2 (Cai et al. 2024, arXiv 2401.10774, sections 2.2.2 and 2.3.1): heads and their model.

Two stages. First the heads learn alone, as in Medusa-1. Then the layers of the model learn with
them, more slowly, so that its states say more about the tokens ahead. What it writes is to stay: it
is taught the law of the original all the while (self-distillation), which runs beside it unchanged:

    L = KL(original || model) + (1 / fidelity) sum_k decay^k CE_k

The original's law is what the heads are taught, too, so that the model itself is one more head: the
one that reads the row of the law. Heads and model keep the original's output matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from forerun.config import Settings
from forerun.errors import ConfigError
from forerun.interop import medusa as checkpoint
from forerun.models.decoder import Decoder
from forerun.models.heads.layers import Size
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.hub import LoadedModel, decoder_weights, locate
from forerun.models.target import OpenTarget
from forerun.train.backbone import Backbone
from forerun.train.capture import Batch
from forerun.train.examples import Example
from forerun.train.objectives.base import Loss, nothing
from forerun.train.objectives.medusa import HeadSettings, MedusaObjective
from forerun.train.quality import Quality, Yardstick
from forerun.train.vocabulary import Vocabulary

RISE = 0.2  # of the second stage, over which the model's learning rate rises from zero
RATES = {"lora": 1 / 4, "full": 1 / 50}  # of the heads' learning rate; that of LoRA is published


class Medusa2Settings(HeadSettings):
    """heads_first: share of the steps in which the heads learn alone.

    backbone: what of the model is learned: low-rank matrices beside those of its layers (LoRA,
    merged when the model is written), or all weights of its layers. rank: of these matrices.
    backbone_rate: share of the heads' learning rate; by default 1/4 with LoRA, else 1/50.
    fidelity: weight of the original's law against the loss of the heads.
    max_kl: bound on KL(original || model), in nats per held-out token; training stops where a trial
    finds more. held_texts: held-out texts that this is measured on.
    """

    title = "medusa2"

    heads_first: Annotated[float, Field(ge=0, lt=1)] = 0.5
    backbone: Literal["lora", "full"] = "lora"
    rank: Size = 32
    backbone_rate: Annotated[float, Field(gt=0)] | None = None
    fidelity: Annotated[float, Field(gt=0)] = 20.0
    max_kl: Annotated[float, Field(gt=0)] = 0.02
    held_texts: Size = 32


class _Both(nn.Module):
    def __init__(self, heads: MedusaHeads, backbone: Backbone) -> None:
        super().__init__()
        self.heads, self.backbone = heads, backbone


class Medusa2(MedusaObjective):
    """What it leaves is a model with its heads beside it, in the authors' layout."""

    name = "medusa2"
    settings = Medusa2Settings
    defaults: ClassVar = {"draft_vocab": "all", "trials": 8}
    parts = ("heads.", "backbone.")
    changes_model = True

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        vocabulary: Vocabulary,
        generator: torch.Generator,
    ) -> None:
        if vocabulary.reduced:
            raise ConfigError(
                "the layout of Medusa-2 holds no heads for a part of the vocabulary; set "
                'draft_vocab = "all"'
            )
        super().__init__(settings, model, vocabulary, generator)
        assert isinstance(settings, Medusa2Settings)
        self._s = settings
        info = self.target.info
        self._config = MedusaConfig(
            hidden_size=info.hidden_size,
            heads=settings.heads,
            layers=settings.layers,
            output="target",
        )
        rank = settings.rank if settings.backbone == "lora" else None
        backbone = Backbone(self.target, rank, generator)
        self.ahead = settings.heads
        self.network: _Both = _Both(MedusaHeads(self._config), backbone).to(info.device)
        self._yardstick: Yardstick | None = None

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Nothing is drawn."""
        blocks, backbone = self.network.heads.blocks, self.network.backbone
        if self._alone:
            found = self._teach(batch, batch.final_BRC, blocks, self._s)
            return found._replace(total=found.total + nothing(backbone))
        states_BRC = backbone(batch.tokens_BR)
        return self._teach(batch, states_BRC, blocks, self._s, own=self._s.fidelity)

    def rate(self, part: str) -> float:
        if part == "heads.":
            return 1.0
        along = (self.done - self._s.heads_first) / (1 - self._s.heads_first)
        highest = self._s.backbone_rate or RATES[self._s.backbone]
        return highest * min(max(along / RISE, 0.0), 1.0)

    @property
    def _alone(self) -> bool:
        return self.done < self._s.heads_first

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        heads = MedusaHeads(self._config)
        heads.load_state_dict(_inside(weights, "heads."))
        changed = self.network.backbone.published(_inside(weights, "backbone."))
        heads = heads.to(self.target.info.dtype)
        checkpoint.write_beside(heads, locate(self.model.name), folder, changed)

    def served(self, folder: Path) -> LoadedModel:
        info = self.target.info
        config, weights = decoder_weights(folder, info.dtype)
        target = Decoder(config, weights, info.dtype, info.device, str(folder))
        return replace(self.model, name=str(folder), target=target)

    def quality(self, served: LoadedModel, held: Sequence[Example]) -> Quality:
        if self._yardstick is None:
            texts = held[: self._s.held_texts]
            self._yardstick = Yardstick(self.target, texts, self._s.max_kl)
        return self._yardstick(cast("OpenTarget", served.target))


def _inside(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(part): tensor for name, tensor in weights.items() if name.startswith(part)
    }
