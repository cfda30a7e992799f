"""The blocks of DFlash in training: where they begin, what they are taught, what their slots see.

A blocks lie side by side in each of B sequences, each of W slots, D of which draft. R rows of a
sequence, H heads, G kv heads, h heads per kv head, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.train.capture import Batch


def draw_anchors(
    batch: Batch, count: int, anchor_first: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`count` different anchors per sequence, or fewer: their rows and which are used, [B, A].

    An anchor is a supervised token in front of another; the last token of a prompt, too, where the
    slot of the anchor drafts. Unused ones see nothing and are taught nothing.
    """
    taught_BR = torch.zeros_like(batch.supervised_BR)
    taught_BR[:, :-1] = batch.supervised_BR[:, 1:]
    able_BR = taught_BR if anchor_first else taught_BR & batch.supervised_BR
    count = max(1, min(count, int(able_BR.sum(1).max())))
    chance_BR = torch.rand(able_BR.shape, generator=generator).to(able_BR.device)
    chances_BA, anchors_BA = chance_BR.masked_fill(~able_BR, -1.0).topk(count)
    used_BA = chances_BA >= 0
    return anchors_BA * used_BA, used_BA


def taught(batch: Batch, anchors_BA: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    """Rows of the tokens that the drafting slots predict and whether they are taught, [B, A, D].

    What is taught is a prefix of each block: drafts behind an untaught one are never used.
    """
    row_BAD = anchors_BA[..., None] + torch.arange(1, drafts + 1, device=anchors_BA.device)
    last = batch.supervised_BR.shape[1] - 1
    inside_BAD = row_BAD <= last  # padding behind a shorter sequence is not supervised
    row_BAD = row_BAD.clamp(max=last)
    supervised_BAD = batch.supervised_BR.gather(1, row_BAD.flatten(1)).view_as(row_BAD)
    taught_BAD = (supervised_BAD & inside_BAD).cumprod(-1).bool()
    return row_BAD, taught_BAD


def dpace(right_BAD: Tensor, taught_BAD: Tensor, floor: float = 0.5) -> Tensor:
    """Weights of the slots by D-PACE (2605.18810, equation 6), [B, A, D].

    A slot counts for every draft length that needs it: the sum, over the slots from it on, of the
    chance that all drafts up to there are right. right_BAD: chance that a slot is right if those
    before it are; `floor` keeps late slots in training while early ones are still wrong.
    """
    smoothed_BAD = torch.where(taught_BAD, (1 - floor) * right_BAD + floor, 1.0)
    reached_BAD = smoothed_BAD.cumprod(-1) * taught_BAD
    weights_BAD: Tensor = reached_BAD.flip(-1).cumsum(-1).flip(-1) * taught_BAD
    return weights_BAD


class Blocks:
    """A memory (`heads.attention.Memory`) in which a slot sees the rows before the anchor of its
    block, and all slots of the block.

    Scores of a block with the other blocks of its sequence are never computed: the mask over
    context and slots that `Injected` takes would make up most of the work.

    context_kv: keys and values as `DFlash.context_kv` gives them. Gradients run through.
    """

    def __init__(self, context_kv: Tensor, anchors_BA: Tensor) -> None:
        self.context_kv = context_kv
        rows_R = torch.arange(context_kv.shape[-2], device=anchors_BA.device)
        self.hidden_B1A11R = (rows_R >= anchors_BA[..., None])[:, None, :, None, None]

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """See `Memory.attend`; the rows are slots, block after block."""
        far_keys_BGRE, far_values_BGRE = self.context_kv[layer]
        blocks, groups = self.hidden_B1A11R.shape[2], keys_BGRD.shape[1]
        near_keys_BGAWE = keys_BGRD.unflatten(2, (blocks, -1))
        near_values_BGAWE = values_BGRD.unflatten(2, (blocks, -1))
        # The heads that share a key head lie with the slots: one product serves all of them.
        q_BGhAWE = q_BHRD.unflatten(2, (blocks, -1)).unflatten(1, (groups, -1))
        q_BGAhWE = q_BGhAWE.transpose(2, 3) * q_BHRD.shape[-1] ** -0.5
        heads, slots = q_BGAhWE.shape[3:5]
        far_BGNR = q_BGAhWE.flatten(2, 4) @ far_keys_BGRE.mT
        far_BGAhWR = far_BGNR.unflatten(2, (blocks, heads, slots))
        far_BGAhWR = far_BGAhWR.masked_fill(self.hidden_B1A11R, -torch.inf)
        near_BGAMW = q_BGAhWE.flatten(3, 4) @ near_keys_BGAWE.mT
        near_BGAhWW = near_BGAMW.unflatten(3, (heads, slots))
        law = torch.cat([far_BGAhWR, near_BGAhWW], -1).softmax(-1)
        far_BGAhWR, near_BGAhWW = law.split([law.shape[-1] - slots, slots], -1)
        found_BGNE = far_BGAhWR.flatten(2, 4) @ far_values_BGRE
        found_BGAME = near_BGAhWW.flatten(3, 4) @ near_values_BGAWE
        found_BGAhWE = found_BGNE.view(q_BGAhWE.shape) + found_BGAME.view(q_BGAhWE.shape)
        found_BHRD: Tensor = found_BGAhWE.transpose(2, 3).reshape(q_BHRD.shape)
        return found_BHRD
