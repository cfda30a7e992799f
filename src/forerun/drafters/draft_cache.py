"""Keys and values of draft networks: one tensor per request, grown on demand.

    slots of a request   0 ........ stable | stable ...... used | ........ capacity
    what they hold       committed rows    | the running round  | free

R rows of a pass over all requests, K slots in use, H heads, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.heads.attention import attend

MIN_SLOTS = 64


class DraftCache:
    """What a draft network remembers of one request, `kv` of [layers, 2, G, capacity, D]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv = torch.empty(layers, 2, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.stable = self.used = 0

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows."""
        needed, capacity = self.used + rows, self.kv.shape[3]
        if needed <= capacity:
            return
        shape = list(self.kv.shape)
        shape[3] = max(MIN_SLOTS, needed + needed // 2)
        grown = self.kv.new_empty(shape)
        grown[:, :, :, : self.used] = self.kv[:, :, :, : self.used]
        self.kv = grown

    def write(self, layer: int, keys_GRD: Tensor, values_GRD: Tensor) -> tuple[Tensor, Tensor]:
        """Put the rows of a pass behind those in use; all keys and values of the layer, [G, K, D].

        They count as used once `advance` says so, after the last layer.
        """
        end = self.used + keys_GRD.shape[1]
        self.kv[layer, 0, :, self.used : end] = keys_GRD
        self.kv[layer, 1, :, self.used : end] = values_GRD
        return self.kv[layer, 0, :, :end], self.kv[layer, 1, :, :end]

    def advance(self, rows: int) -> None:
        """The pass is over."""
        self.used += rows

    def settle(self) -> None:
        """What is in use is committed."""
        self.stable = self.used

    def rewind(self) -> None:
        """Forget the running round."""
        self.used = self.stable


class SideBySide:
    """The memory of one pass over rows of several requests, which attend to their own alone.

    counts: rows of each request in the pass, in order. masks: per request, bool [rows, K], what
    each row sees of the slots in use and then of the rows of the pass; None: everything.
    """

    def __init__(
        self,
        caches: Sequence[DraftCache],
        counts: Sequence[int],
        masks: Sequence[Tensor | None],
    ) -> None:
        self.caches, self.counts, self.masks = caches, counts, masks
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(count)

    def attend(self, layer: int, q_BHRD: Tensor, keys_BGRD: Tensor, values_BGRD: Tensor) -> Tensor:
        """See `Memory.attend`; the one sequence of the pass holds the rows of all requests."""
        assert len(q_BHRD) == 1, "rows lie side by side"
        found = []
        begin = 0
        for cache, count, mask_RK in zip(self.caches, self.counts, self.masks, strict=True):
            rows = slice(begin, begin + count)
            keys, values = cache.write(layer, keys_BGRD[0, :, rows], values_BGRD[0, :, rows])
            mask_1RK = None if mask_RK is None else mask_RK[None]
            found.append(attend(q_BHRD[:, :, rows], keys[None], values[None], mask_1RK))
            begin += count
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def finish(self) -> None:
        """The pass is over."""
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.advance(count)
