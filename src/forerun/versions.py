"""Which packages are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*packages: str) -> dict[str, str]:
    """The version of each."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # or a source tree that was never installed
        return "not installed"
