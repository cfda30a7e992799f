"""What the loop asks of a kind of draft.

V tokens of the target, U of the draft, C hidden size, P positions (unroll steps, heads or slots).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from forerun.config import Settings
from forerun.models.hub import LoadedModel
from forerun.models.target import OpenTarget, opened
from forerun.train.capture import Batch
from forerun.train.examples import Example
from forerun.train.losses import Head
from forerun.train.quality import Quality
from forerun.train.vocabulary import Vocabulary


class Loss(NamedTuple):
    """What a batch gave; a tuple, so that several processes can find the tensors in it.

    total: scalar with a gradient: a sum over supervised tokens, divided by `count` of them (so that
    processes can put theirs together). The rest is for reports, sums per position: cross-entropy,
    predictions whose likeliest token is the one that follows, and how many there were.
    """

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # tuples have a method of that name
    loss_P: Tensor
    hits_P: Tensor
    rows_P: Tensor


class Objective(ABC):
    """A draft in training: its network, and how a batch becomes a loss.

    settings: the options of its kind, with their defaults. defaults: what its recipes say unless
    they are told otherwise. shapes: options that give its drafts other shapes, which may be faster
    than `spec`. taps: boundaries of the target that it reads. ahead: tokens that it is taught to
    draft. network: float32; what requires a gradient is trained. It starts from the target where
    that helps.
    parts: of the network, by how the names of its parameters begin, that learn at rates of their
    own. done: share of the run that lies behind; kinds that train in stages look at it.
    changes_model: so that trials hold it to a bound; there must be some.
    vocabulary: the tokens that it may propose; _teacher_head: the target's rows of them, frozen;
    _known_V: their draft ids, -1 elsewhere. generator: for what starts at random.
    """

    name: ClassVar[str]
    settings: ClassVar[type[Settings]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    parts: ClassVar[tuple[str, ...]] = ("",)
    changes_model: ClassVar[bool] = False
    shapes: ClassVar[tuple[str, ...]] = ("top_k=4,nodes=8", "top_k=4,nodes=16")
    taps: tuple[int, ...]
    ahead: int
    network: nn.Module
    done: float = 0.0

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        vocabulary: Vocabulary,
        generator: torch.Generator,
    ) -> None:
        self.model = model
        self.target: OpenTarget = opened(model.target, self.name)
        self.vocabulary = vocabulary
        device = self.target.info.device
        self._teacher_head = Head(head_rows(self.target, vocabulary.ids_U.to(device)))
        self._known_V = vocabulary.lookup().to(device)

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """generator: for what is drawn anew in every step (on the CPU); it depends on the seed and
        the step alone, so that a run can be taken up again.

        Runs under autocast where products are to be in bfloat16.
        """

    def carried(self) -> Sequence[Tensor]:
        """What steps hand on to later ones besides the network: a run that is taken up needs it.
        Each process has its own."""
        return ()

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """Go on with what another object of this kind carried."""
        assert not tensors, f"{self.name} carries nothing"

    def rate(self, part: str) -> float:
        """How fast a part learns now, as a share of the recipe's learning rate."""
        return 1.0

    @abstractmethod
    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a folder that `--draft`, `inspect` and `export` take, in the target's type.

        weights: the state of `network`, whole and on the CPU, wherever it is being trained.
        """

    @abstractmethod
    def spec(self, folder: Path) -> str:
        """The draft spec that serves such a folder as it was trained to be used."""

    def specs(self, folder: Path) -> list[str]:
        """That one and those of other shapes."""
        drafter = self.spec(folder).partition(":")[0]
        return [self.spec(folder), *(f"{drafter}:{folder},{shape}" for shape in self.shapes)]

    def served(self, folder: Path) -> LoadedModel:
        """The model that such a folder drafts for; another one where the model is trained, too."""
        return self.model

    def quality(self, served: LoadedModel, held: Sequence[Example]) -> Quality | None:
        """What became of that model's abilities on held-out texts; None where it is the target."""
        return None


def compute_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in now."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def no_loss(network: nn.Module, positions: int) -> Loss:
    """Of a batch in which nothing is learned: every gradient is there, and zero."""
    total = nothing(network)
    nothing_P = total.detach().expand(positions)
    return Loss(total, total.detach(), nothing_P, nothing_P, nothing_P)


def nothing(network: nn.Module) -> Tensor:
    """Zero, of which every trained parameter has a gradient of zeros: several processes wait for
    the gradients of all."""
    trained = [each for each in network.parameters() if each.requires_grad]
    return torch.stack([each.sum() for each in trained]).sum() * 0


def head_rows(target: OpenTarget, ids_U: Tensor) -> Tensor:
    """The rows of the target's output matrix, [U, C] in its type, however it is stored.

    It is asked for the logits of unit vectors: each is one weight, so the products are exact. Where
    the target caps its logits the rows are those of the capped products.
    """
    info = target.info
    unit_CC = torch.eye(info.hidden_size, dtype=info.dtype, device=info.device)
    columns = [target.head_logits(part_NC)[:, ids_U] for part_NC in unit_CC.split(64)]
    return torch.cat(columns).t().to(info.dtype).contiguous()
