"""Tests marked `real` run where the packaged model has been pulled (`make test` pulls it)."""

from __future__ import annotations

import os

import pytest

from forerun.models import packaged

REAL_MODEL = "smollm2-135m"

os.environ["FORERUN_COSTS"] = "0"  # what tiny models cost is not worth keeping


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if packaged.path(REAL_MODEL):
        return
    skip = pytest.mark.skip(reason=f"run: forerun models pull {REAL_MODEL}")
    for item in items:
        if "real" in item.keywords:
            item.add_marker(skip)
