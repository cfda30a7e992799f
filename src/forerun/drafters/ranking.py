"""Which tokens a draft network would go on with, for many rows at once.

N rows, U draft vocabulary, V vocabulary of the target, C contenders, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from forerun import sampling
from forerun.models.topk import best
from forerun.sampling import Place

CONTENDERS = 128  # tokens of a place that race where a request samples


def contenders(top_k: int) -> int:
    """How many tokens of a place race where `top_k` of them are wanted."""
    return max(CONTENDERS, top_k)


def rank(
    logits_NU: Tensor,
    places: Sequence[Place],
    top_k: int,
    ids_U: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, best first, and the belief in each, [N, K].

    Where the target samples, it takes the largest log p + noise. The draft ranks by its own log q +
    the same noise, and believes in a token as far as it stands out among the others. Where the
    target is greedy both go without noise. Tokens that the law leaves out have belief 0.
    places: neighbours with the same request must stand at the same position.
    ids_U: ids of the draft's tokens where they are not those of the target, which has `vocab_size`.
    """
    top_k = min(top_k, logits_NU.shape[1])
    if all(place.is_argmax for place in places):
        columns_NK, beliefs_NK = best(logits_NU, top_k)
        return (columns_NK if ids_U is None else ids_U[columns_NK]), beliefs_NK
    parts = []
    begin = 0
    for _, group in groupby(places, key=lambda place: place.request.id):
        rows = list(group)
        logits = _edited(logits_NU[begin : begin + len(rows)], rows, ids_U, vocab_size)
        parts.append(_rank_alike(logits, rows[0], top_k, ids_U))
        begin += len(rows)
    columns_NK = torch.cat([columns for columns, _ in parts])
    beliefs_NK = torch.cat([beliefs for _, beliefs in parts]).nan_to_num(0.0)  # all forbidden
    return (columns_NK if ids_U is None else ids_U[columns_NK]), beliefs_NK


def _rank_alike(
    logits_NU: Tensor, place: Place, top_k: int, ids_U: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of one request at one position, edited already."""
    if place.request.params.greedy:
        return best(logits_NU, top_k)
    columns_NC, scores_NC = sampling.contenders(logits_NU, place, ids_U, contenders(top_k))
    order_NK, beliefs_NK = best(scores_NC, top_k)
    return columns_NC.gather(1, order_NK), beliefs_NK


def _edited(
    logits_NU: Tensor, places: Sequence[Place], ids_U: Tensor | None, vocab_size: int
) -> Tensor:
    """Penalties, bias and min_tokens as the target applies them, which counts in its own ids."""
    if not any(place.request.params.edits_logits or place.forbids_stop for place in places):
        return logits_NU
    rows = []
    for logits_U, place in zip(logits_NU, places, strict=True):
        if ids_U is None:
            rows.append(sampling.edited(logits_U, place))
        else:
            logits_V = logits_U.new_full((vocab_size,), -torch.inf)
            logits_V[ids_U] = logits_U
            rows.append(sampling.edited(logits_V, place)[ids_U])
    return torch.stack(rows)
