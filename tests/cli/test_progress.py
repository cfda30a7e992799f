"""What a long command says on its way."""

from __future__ import annotations

import io

from forerun.cli.progress import Line, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_and_time_left_of_this_run_alone() -> None:
    clock = Clock()
    progress = Progress("answers", 1000, 400, io.StringIO(), clock)
    for _ in range(100):
        clock.now += 1
        progress.add(50)
    assert progress.line() == "answers 500/1000, 5000 tokens, 50 tok/s, 8 min left"
    clock.now += 900
    assert progress.line() == "answers 500/1000, 5000 tokens, 5 tok/s, 83 min left"
    clock.now += 9000
    assert progress.line().endswith("13 h 53 min left")


def test_things_without_tokens() -> None:
    clock = Clock()
    progress = Progress("prompts", 4, 0, io.StringIO(), clock)
    clock.now += 2
    assert progress.line() == "prompts 0/4, 0.0/s, 2 s"
    progress.add()
    assert progress.line() == "prompts 1/4, 0.5/s, 6 s left"


def test_a_file_gets_a_line_now_and_then() -> None:
    clock, file = Clock(), io.StringIO()
    with Progress("answers", 200, 0, file, clock) as progress:
        for _ in range(100):
            clock.now += 1
            progress.add(1)
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"answers {done}/200" for done in (30, 60, 90, 100)
    ]


def test_a_terminal_has_one_line() -> None:
    clock, file = Clock(), Terminal()
    with Progress("answers", 2, 0, file, clock) as progress:
        for _ in range(2):
            clock.now += 1
            progress.add(1)
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().endswith("\r\x1b[Kanswers 2/2, 2 tokens, 1 tok/s, 2 s\n")


def test_what_is_said_stays_above_what_changes() -> None:
    clock, file = Clock(), Terminal()
    line = Line(file, clock)
    assert not line.due
    clock.now += 1
    assert line.due
    line.show("step 1")
    line.say("tried")
    line.show("step 2")
    line.end()
    line.end()
    assert file.getvalue() == "\r\x1b[Kstep 1\r\x1b[Ktried\n\r\x1b[Kstep 2\n"
