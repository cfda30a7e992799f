"""The frame around all commands: help, wrong command lines, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.cli import main as cli
from forerun.cli.main import app, main
from forerun.errors import ConfigError


def test_help_lists_the_commands_and_starts_with_something_to_paste() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "forerun generate" in result.output
    for command in ("generate", "bench", "inspect", "models"):
        assert f"\n  {command}" in result.output


@pytest.mark.parametrize("command", ["generate", "bench", "inspect", "models"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"forerun {command}" in result.output or command == "models"


def test_help_loads_no_tensor_library() -> None:
    code = (
        "import sys; from forerun.cli.main import main; main(['generate', '--help']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_version_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("forerun ")
    run = subprocess.run([sys.executable, "-m", "forerun", "--version"], capture_output=True)
    assert run.stdout.startswith(b"forerun ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temprature", "1"], "did you mean '--temperature'?"),
        (["generate", "x", "--top_p", "1"], "did you mean '--top-p'?"),
        (["bench", "--workloads", "mix"], "did you mean '--workload'?"),
        (["generate"], "missing argument 'prompt'"),
        (["generat", "x"], "did you mean 'generate'?"),
        (["models", "fetch"], "no such command 'fetch'"),
        (["generate", "x", "--max-tokens", "many"], "valid int"),
        (["generate", "x", "--seed"], "requires an argument"),
    ],
)
def test_wrong_command_lines_end_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err.lower()


def test_expected_failures_and_interruptions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    error: BaseException = ConfigError("no such thing; choose another")
    assert main([]) == 1
    assert capsys.readouterr().err == "error: no such thing; choose another\n"
    error = KeyboardInterrupt()
    assert main([]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    error = ZeroDivisionError()  # what forerun itself got wrong is not dressed up
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize("command", [[], ["models"]])
def test_without_a_command_the_help_is_shown(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert main([*command, "--help"]) == 0
    assert err == capsys.readouterr().out


def test_help_is_not_cut_and_speaks_no_python() -> None:
    for command in ([], ["models"]):
        result = CliRunner().invoke(app, [*command, "--help"])
        assert "...\n" not in result.output.partition("Options:")[2]
    assert "list[" not in CliRunner().invoke(app, ["generate", "--help"]).output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_told_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "forerun", "models", "list"], stdout=full, stderr=subprocess.PIPE
        )
    assert run.returncode == 1
    assert run.stderr == b"error: cannot write the output: the disk is full; make room\n"


def test_a_reader_that_goes_away_is_no_failure_worth_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "forerun", "models", "list"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert run.stderr == b""
