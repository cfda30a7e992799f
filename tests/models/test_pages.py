"""Weights in large pages: the same numbers, each in its own place."""

from __future__ import annotations

import pytest
import torch

from forerun.models import pages
from forerun.models.pages import LINE, Pages


def test_tensors_are_kept_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, in the next one, and one that is larger than a chunk."""
    monkeypatch.setattr(pages, "CHUNK", 4096)
    memory = Pages()
    numbers = [torch.randn(shape) for shape in ((3, 5), (7, 2, 9), (40, 20), (60, 60), (1, 1))]
    numbers.append(torch.randn(6, 8).to(torch.bfloat16).t())
    kept = [memory.keep(each) for each in numbers]
    for copy, original in zip(kept, numbers, strict=True):
        assert torch.equal(copy, original)
        assert copy.dtype is original.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % LINE == 0
