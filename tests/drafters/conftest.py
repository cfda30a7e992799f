"""A tiny target for drafts that run in compiled rounds; other tests make one of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.hub import LoadedModel, load
from tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("target"), layers=4, seed=1)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load(str(folder), "float32", "cpu")
