"""Options of these tests, and the table that they end with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the modules beside this file

from comparison import Comparison
from engines import FAMILIES

REPORT = pytest.StashKey[list[Comparison]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    for family in FAMILIES:
        parser.addoption(
            f"--{family}",
            type=Path,
            metavar="DIR",
            help=f"a {family} checkpoint for smollm2-135m instead of the one that ships",
        )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = []


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> list[Comparison]:
    """What was compared, for the table."""
    return pytestconfig.stash[REPORT]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for comparison in config.stash[REPORT]:
        terminalreporter.write_line(comparison.summary)
