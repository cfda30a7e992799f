"""Memory for weights in large pages.

A pass reads all weights once, from front to back. In pages of 4 KB it has to translate an address
for every 64 lines it reads, and these translations, like the lines, push others out of the caches.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

CHUNK = 2**26  # bytes asked for at once; what is not used of them takes no memory
LINE = 64


class Pages:
    """Tensors one behind the other, in pages of 2 MB where the system has them (Linux)."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy here; elsewhere where there are no such pages."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        size = tensor.numel() * tensor.itemsize
        if size > len(self._free):
            self._free = _chunk(max(CHUNK, size))
        place, self._free = self._free[:size], self._free[-(-size // LINE) * LINE :]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _chunk(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
