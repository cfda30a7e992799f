"""The largest of many scores.

N rows, C scores, K of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models import kernels


def best(scores_NC: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Columns of the largest scores, best first, and their shares in a softmax over all.

    float32. On processors with compiled kernels the lowest column comes first in a tie.
    """
    lib = kernels.for_scores(scores_NC)
    if lib is None:
        top_NK, columns_NK = scores_NC.topk(top_k)
        return columns_NK, (top_NK - scores_NC.logsumexp(-1, keepdim=True)).exp()
    rows, size = scores_NC.shape
    scores_NC = scores_NC.contiguous()
    columns_NK = torch.empty(rows, top_k, dtype=torch.int64)
    shares_NK = torch.empty(rows, top_k)
    addresses = columns_NK.data_ptr(), shares_NK.data_ptr()
    lib.best(scores_NC.data_ptr(), rows, size, size, top_k, *addresses)
    return columns_NK, shares_NK
