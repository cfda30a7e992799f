"""Drafts of every family that know a handful of texts by heart.

They stand in for trained checkpoints where it matters only that a draft is right often, and that
every tensor and setting of it has a say. Each is written in the layout its family is published in.

B texts, T tokens, R rows, K keys, A anchors, Q slots, D drafted tokens, F features; C hidden size,
V vocabulary, U the tokens that are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from forerun.interop import dflash, eagle, medusa
from forerun.models.heads.attention import Joined
from forerun.models.heads.dflash import DFlash, DFlashConfig, Injected, LayerAttention
from forerun.models.heads.eagle import Eagle3, Eagle3Settings
from forerun.models.heads.medusa import MedusaConfig, MedusaHeads
from forerun.models.hub import LoadedModel
from forerun.models.target import Segment

EAGLE_TAPS = (1, 14, 28)  # no engine's defaults: the export must state them
DFLASH_TAPS = (2, 16, 29)
MASK = 0  # <|endoftext|>, which no conversation holds


@dataclass(frozen=True)
class Text:
    """A prompt with the target's answer, all tokens in a row."""

    tokens: list[int]
    prompt_length: int


def fit(family: str, model: LoadedModel, texts: Sequence[Text], k: int, folder: Path) -> None:
    """Write a draft of k tokens; it has learned the answers of `texts`."""
    torch.manual_seed(0)
    FITS[family](model, texts, k, folder)


def taps_of(model: LoadedModel, text: Text, taps: Sequence[int]) -> Tensor:
    """Of all tokens, from one plain pass, [T, taps, C] in float32."""
    store = model.target.new_store(len(text.tokens))
    span = store.open()
    store.reserve(span, len(text.tokens))
    segment = Segment(span, text.tokens, logits_from=len(text.tokens))
    taps_TXC = model.target.forward([segment], store, taps).taps_RTD
    assert taps_TXC is not None
    return taps_TXC.float()


def train(module: nn.Module, losses: Sequence[Callable[[], Tensor]], rounds: int) -> None:
    """Minimise each loss `rounds` times in turn: a short warm-up, then ever smaller steps."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    steps = rounds * len(losses)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 20) * (1 - step / steps)
    )
    for step in range(steps):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses[step % len(losses)]()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
    module.requires_grad_(False).to(torch.bfloat16)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that answers are made of, and the target's two matrices."""

    ids_U: Tensor
    draft_ids_V: Tensor  # the place of each target id in `ids_U`
    head_VC: Tensor
    embedding_VC: Tensor

    @property
    def head_UC(self) -> Tensor:
        return self.head_VC[self.ids_U]

    @classmethod
    def of(cls, model: LoadedModel, texts: Sequence[Text]) -> Vocabulary:
        target: Any = model.target
        size = target.info.vocab_size
        ids_U = torch.tensor(
            sorted({token for text in texts for token in text.tokens[text.prompt_length :]})
        )
        draft_ids_V = torch.full((size,), -100)  # which cross_entropy leaves out
        draft_ids_V[ids_U] = torch.arange(len(ids_U))
        identity = torch.eye(target.info.hidden_size, dtype=target.info.dtype)
        return cls(
            ids_U,
            draft_ids_V,
            head_VC=target.head_logits(identity).T.contiguous(),
            embedding_VC=target.embed(torch.arange(size), scaled=False).float(),
        )


# ---- Medusa -------------------------------------------------------------------------------------


def fit_medusa(model: LoadedModel, texts: Sequence[Text], k: int, folder: Path) -> None:
    """Heads that share an output matrix of their own.

    It holds all tokens: vLLM 0.32 loads no reduced vocabulary without further ado.
    """
    vocabulary, info = Vocabulary.of(model, texts), model.target.info
    config = MedusaConfig(
        hidden_size=info.hidden_size,
        heads=k,
        output="one",
        vocab_size=info.vocab_size,
    )
    module = MedusaHeads(config)
    module.lm_heads[0].weight = nn.Parameter(vocabulary.head_UC)  # the rows to train
    states, labels = [], []
    for text in texts:
        tokens_T = vocabulary.draft_ids_V[torch.tensor(text.tokens)]
        rows_R = torch.arange(text.prompt_length - 1, len(text.tokens) - k - 1)
        hidden_TC = taps_of(model, text, (info.layers,))[:, 0]
        target: Any = model.target
        states.append(target.final_norm(hidden_TC.to(info.dtype))[rows_R].float())
        labels.append(tokens_T[rows_R[:, None] + torch.arange(2, k + 2)])
    order_N = torch.randperm(sum(map(len, states)))
    states_NC, labels_ND = torch.cat(states)[order_N], torch.cat(labels)[order_N]

    def loss_of(states_NC: Tensor, labels_ND: Tensor) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            logits_NDU = module(states_NC, nn.Identity())
            return cross_entropy(logits_NDU.flatten(0, 1), labels_ND.flatten())

        return loss

    batches = zip(states_NC.split(256), labels_ND.split(256), strict=True)
    train(module, [loss_of(*batch) for batch in batches], ROUNDS["medusa"])
    matrix_VC = vocabulary.head_VC.to(info.dtype)
    matrix_VC[vocabulary.ids_U] = module.lm_heads[0].weight
    module.lm_heads[0].weight = nn.Parameter(matrix_VC, requires_grad=False)
    medusa.export(module, "vllm", folder)


# ---- EAGLE-3 ------------------------------------------------------------------------------------


def fit_eagle3(model: LoadedModel, texts: Sequence[Text], k: int, folder: Path) -> None:
    """One layer with an output matrix of its own for the tokens of the answers."""
    vocabulary, info = Vocabulary.of(model, texts), model.target.info
    settings = Eagle3Settings(
        hidden_size=info.hidden_size,
        intermediate_size=info.hidden_size,
        heads=9,
        kv_heads=3,
        head_dim=64,
        max_length=info.max_length,
        vocab_size=info.vocab_size,
        target_hidden_size=info.hidden_size,
        taps=EAGLE_TAPS,
        draft_vocab_size=len(vocabulary.ids_U),
    )
    module = Eagle3(settings)
    module.d2t = vocabulary.ids_U - torch.arange(len(vocabulary.ids_U))
    assert module.lm_head is not None
    module.lm_head.weight.data = vocabulary.head_UC
    # The state behind layer 27 is a good beginning.
    module.fc.weight.data[:, -info.hidden_size :] = torch.eye(info.hidden_size)
    losses = [
        _eagle3_loss(module, model, texts[i : i + 2], vocabulary, k)
        for i in range(0, len(texts), 2)
    ]
    train(module, losses, ROUNDS["eagle3"])
    eagle.export(module, "specforge", folder)


def _eagle3_loss(
    module: Eagle3, model: LoadedModel, texts: Sequence[Text], vocabulary: Vocabulary, k: int
) -> Callable[[], Tensor]:
    """Rows as drafting computes them: k passes over every text, each fed what the one before gave
    (training-time test, Li et al. 2025, section 3.2). Row t of pass j was drafted j rows after the
    last one with features, t - j: it sees the rows of pass 0 up to there, and its own path."""
    features = [taps_of(model, text, EAGLE_TAPS).flatten(1)[:-1] for text in texts]
    features_BRF = pad_sequence(features, batch_first=True)
    tokens = [torch.tensor(text.tokens) for text in texts]
    tokens_BT = pad_sequence(tokens, batch_first=True)
    embedded_BRC = vocabulary.embedding_VC[tokens_BT[:, 1:]]
    answers = [
        vocabulary.draft_ids_V[ids_T].index_fill(0, torch.arange(text.prompt_length), -100)
        for text, ids_T in zip(texts, tokens, strict=True)
    ]
    padded_BT = pad_sequence(answers, batch_first=True, padding_value=-100)
    labels_BR = torch.nn.functional.pad(padded_BT[:, 2:], (0, 1), value=-100)
    rows = labels_BR.shape[1]
    positions_BR = torch.arange(rows).expand_as(labels_BR)
    ones_RR, eye_RR = torch.ones(rows, rows, dtype=torch.bool), torch.eye(rows, dtype=torch.bool)
    itself_R1 = torch.arange(rows)[:, None]

    def loss() -> Tensor:
        memory, total = Joined(), torch.tensor(0.0)
        hidden_BRC = module.fuse(features_BRF)
        for j in range(k):
            masks = [ones_RR.tril(-j), *(eye_RR.roll(i - j, 1) for i in range(1, j + 1))]
            # The first j rows have no path of that length: they are rows of padding.
            masks = [torch.where(itself_R1 < j, ones_RR, mask_RR) for mask_RR in masks]
            memory.mask_BRK = torch.cat(masks, 1)[None]
            hidden_BRC = module(hidden_BRC, embedded_BRC, positions_BR, memory)
            logits_BRU = module.lm_head(module.readout(hidden_BRC))  # type: ignore[misc]
            total = total + cross_entropy(
                logits_BRU[:, j:].flatten(0, 1), labels_BR[:, j:].flatten()
            )
            hidden_BRC = hidden_BRC.roll(1, 1)
        return total / k

    return loss


# ---- DFlash -------------------------------------------------------------------------------------


def fit_dflash(model: LoadedModel, texts: Sequence[Text], k: int, folder: Path) -> None:
    """One layer with the target's output matrix."""
    vocabulary, info = Vocabulary.of(model, texts), model.target.info
    config = DFlashConfig(
        hidden_size=info.hidden_size,
        intermediate_size=info.hidden_size,
        layers=1,
        heads=9,
        kv_heads=3,
        head_dim=64,
        max_length=info.max_length,
        vocab_size=info.vocab_size,
        target_hidden_size=info.hidden_size,
        target_layers=info.layers,
        taps=DFLASH_TAPS,
        block_size=k + 1,
        mask_token=MASK,
        attention=(LayerAttention(),),
    )
    module = DFlash(config)
    module.layers[0].self_attn.q_norm.weight.data *= 4  # type: ignore[union-attr, operator]
    losses = [_dflash_loss(module, model, text, vocabulary) for text in texts]
    train(module, losses, ROUNDS["dflash"])
    dflash.export(module, "zlab", folder)


def _dflash_loss(
    module: DFlash, model: LoadedModel, text: Text, vocabulary: Vocabulary
) -> Callable[[], Tensor]:
    """Blocks at every place of the answer."""
    width = module.config.block_size
    anchors_A = torch.arange(text.prompt_length, len(text.tokens) - width + 1)
    context_1K = torch.arange(len(text.tokens))[None]
    taps_1TXC = taps_of(model, text, module.config.taps)[None]
    positions_AQ = anchors_A[:, None] + torch.arange(width)
    tokens_T = torch.tensor(text.tokens)
    block_AQ = torch.full_like(positions_AQ, module.config.mask_token)
    block_AQ[:, 0] = tokens_T[anchors_A]
    embedded_1NC = vocabulary.embedding_VC[block_AQ.flatten()][None]
    positions_1N = positions_AQ.reshape(1, -1)
    visible = module.visible(positions_1N, anchors_A.repeat_interleave(width)[None], context_1K)
    labels_AD = vocabulary.draft_ids_V[tokens_T[positions_AQ[:, 1:]]]
    head_UC = vocabulary.head_UC

    def loss() -> Tensor:
        memory = Injected(module.context_kv(taps_1TXC, context_1K), visible)
        hidden_NC = module(embedded_1NC, positions_1N, memory)[0]
        drafted_ADC = hidden_NC.unflatten(0, block_AQ.shape)[:, 1:]
        logits_NU = drafted_ADC.flatten(0, 1) @ head_UC.T
        return cross_entropy(logits_NU.float(), labels_AD.flatten())

    return loss


FITS = {"medusa": fit_medusa, "eagle3": fit_eagle3, "dflash": fit_dflash}
ROUNDS = {"medusa": 10, "eagle3": 20, "dflash": 30}  # two minutes at most on two cores
