"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): heads beside a frozen model.

What head k reads lies k + 1 rows before the state from which the target predicts the same token, so
the target's own law at that row is what all heads are taught there:

    rows                 j - 2    j - 1    j           j + 1
    the token of j + 1   head 1   head 0   the target

The loss is sum_k decay^k CE_k. Fresh residual layers change nothing: head k starts as the target's
own head. One output matrix, frozen rows of the target's, serves all heads: it is the only reduced
vocabulary that vLLM 0.32 loads.

B sequences, R rows, N supervised tokens, S heads, C hidden size, U tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from forerun.config import Settings
from forerun.interop import medusa as checkpoint
from forerun.models.heads.layers import Size
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.hub import LoadedModel
from forerun.train.capture import Batch
from forerun.train.losses import hard_cross_entropy, soft_cross_entropy
from forerun.train.objectives.base import Loss, Objective, compute_dtype
from forerun.train.shuffle import ShuffleBuffer
from forerun.train.vocabulary import Vocabulary


class HeadSettings(Settings):
    """heads: tokens to look ahead. layers: residual layers of each head. decay: weight of a head
    against the one before it.
    """

    heads: Size = 4
    layers: Size = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8


class MedusaSettings(HeadSettings):
    """labels: `soft` teaches the target's law, `hard` the token it wrote. shuffle: rows to keep, so
    that a step learns from those of many texts.
    """

    title = "medusa"

    labels: Literal["soft", "hard"] = "soft"
    shuffle: Annotated[int, Field(ge=0)] = 0


class MedusaObjective(Objective):
    """What Medusa-1 and Medusa-2 share: how heads are taught."""

    taps = ()
    shapes = ("top_k=1", "top_k=4,nodes=8")  # beside a tree of 16

    def _teach(
        self,
        batch: Batch,
        states_BRC: Tensor,
        blocks: Iterable[nn.Module],
        settings: HeadSettings,
        own: float | None = None,
        hard: bool = False,
        shuffle: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> Loss:
        """states_BRC: what heads read, behind the final norm. blocks: of the heads.

        own: weight of what the model that has these states says itself, taught the target's law
        like a head that reads the row of the law; None where that model is the target.
        hard: teach the tokens of the text instead of the law.
        shuffle: puts others in the place of these rows.
        """
        first, modules = (1, [*blocks]) if own is None else (0, [nn.Identity(), *blocks])
        weights_S = [settings.decay**k for k in range(settings.heads)]
        weights_S = weights_S if own is None else [own, *weights_S]
        sequence_N, row_N = batch.supervised_BR[:, 1:].nonzero(as_tuple=True)
        device = row_N.device
        reach_S1 = torch.arange(first, settings.heads + 1, device=device)[:, None]
        valid_SN = row_N >= reach_S1
        read_SN = (row_N - reach_S1).clamp(min=0)
        labels_N = self._known_V[batch.tokens_BR[sequence_N, row_N + 1]]
        read_SNC = states_BRC.to(compute_dtype(device))[sequence_N, read_SN]
        teacher = [] if hard else [batch.final_BRC[sequence_N, row_N]]
        if shuffle:
            read_NSC, valid_NS, labels_N, *teacher = shuffle(
                [read_SNC.transpose(0, 1), valid_SN.t(), labels_N, *teacher]
            )
            read_SNC, valid_SN = read_NSC.transpose(0, 1), valid_NS.t()
        states_SNC = torch.stack(
            [module(read_NC) for module, read_NC in zip(modules, read_SNC, strict=True)]
        ).to(self._teacher_head.weight_UC.dtype)
        learned_SN = valid_SN & (labels_N >= 0) if hard else valid_SN
        weights_SN = torch.tensor(weights_S, device=device)[:, None] * learned_SN
        if hard:
            rows = hard_cross_entropy(states_SNC, self._teacher_head, weights_SN, labels_N)
        else:
            rows = soft_cross_entropy(
                states_SNC, self._teacher_head, teacher[0], self._teacher_head, weights_SN, labels_N
            )
        count, heads = weights_SN.sum(), slice(1 - first, None)
        return Loss(
            total=rows.total / count.clamp(min=1e-6),
            count=count,
            loss_P=(rows.loss_SN * learned_SN).sum(1)[heads],
            hits_P=(rows.hits_SN & valid_SN).sum(1)[heads],
            rows_P=valid_SN.sum(1)[heads],
        )

    def spec(self, folder: Path) -> str:
        return f"medusa:{folder}"


class Medusa1(MedusaObjective):
    """The residual layers of all heads are trained, and nothing else."""

    name = "medusa"
    settings = MedusaSettings

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        vocabulary: Vocabulary,
        generator: torch.Generator,
    ) -> None:
        super().__init__(settings, model, vocabulary, generator)
        assert isinstance(settings, MedusaSettings)
        self._s = settings
        self.ahead = settings.heads
        info = self.target.info
        self._config = MedusaConfig(
            hidden_size=info.hidden_size,
            heads=settings.heads,
            layers=settings.layers,
            output="one",
            vocab_size=info.vocab_size,
            draft_vocab_size=len(vocabulary) if vocabulary.reduced else None,
            base_model=model.name,
        )
        heads = MedusaHeads(self._config).to(info.device)
        heads.get_parameter("lm_heads.0.weight").requires_grad_(False).copy_(
            self._teacher_head.weight_UC
        )
        if vocabulary.reduced:
            heads.token_map = vocabulary.ids_U.to(info.device)
        self.network: MedusaHeads = heads
        self._buffer = ShuffleBuffer(settings.shuffle)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Only a buffer draws."""
        return self._teach(
            batch,
            batch.final_BRC,
            self.network.blocks,
            self._s,
            hard=self._s.labels == "hard",
            shuffle=(lambda rows: self._buffer(rows, generator)) if self._s.shuffle else None,
        )

    def carried(self) -> Sequence[Tensor]:
        return self._buffer.rows

    def carry(self, tensors: Sequence[Tensor]) -> None:
        self._buffer.fill([each.to(self.target.info.device) for each in tensors])

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        heads = MedusaHeads(self._config)
        heads.load_state_dict(dict(weights))
        checkpoint.export(heads.to(self.target.info.dtype), "vllm", folder, self.model.name)
