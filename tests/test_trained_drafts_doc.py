"""The commands of docs/trained-drafts.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.interop import dflash
from tiny import tiny_llama
from tiny_heads import tiny_dflash_module, tiny_eagle, tiny_medusa

PAGE = (Path(__file__).parent.parent / "docs" / "trained-drafts.md").read_text(encoding="utf-8")


def lines(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


COMMANDS = lines("sh")
EXPORTS = [command for command in COMMANDS if command.startswith("forerun export")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a draft of each kind, as the page calls them."""
    folder = tmp_path_factory.mktemp("page")
    model = tiny_llama(folder / "model", layers=4, max_length=1024)
    tiny_medusa(folder / "heads", folder / "model", "medusa")
    tiny_eagle(folder / "eagle", model, "eagle")
    tiny_eagle(folder / "eagle3", model, taps=(2, 3, 4))  # SGLang cannot be told to read 1 first
    draft = tiny_dflash_module(model.target.info, taps=(1, 2), block_size=4)
    dflash.export(draft, "zlab", folder / "dflash")
    (folder / "tree.json").write_text("[[0], [0, 0], [1]]")
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in EXPORTS])
def test_command_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(command)
    assert name == "forerun"
    assert main(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


def test_exports_print_the_lines_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for command in EXPORTS:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.splitlines() == lines("text")


def test_every_kind_of_command_is_there() -> None:
    assert {command.split()[1] for command in COMMANDS} == {
        "inspect",
        "generate",
        "bench",
        "export",
    }
    assert len(EXPORTS) == len(lines("text")) >= 8
