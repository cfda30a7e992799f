"""Colours by proposer, over text that lags behind the tokens."""

from __future__ import annotations

import re

from forerun.cli.paint import COLOURS, RESET, Painter
from forerun.engine.outputs import Delta

A, B = COLOURS[:2]


class Letters:
    """One token per letter; token 0 holds its text back until the next one comes."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        if not token_id:
            self.held = "é"
            return ""
        text, self.held = self.held + chr(token_id), ""
        return text

    def flush(self) -> str:
        return self.held


def delta(text: str, tokens: str, sources: list[str]) -> Delta:
    return Delta(0, text, [0 if t == "0" else ord(t) for t in tokens], sources)


def plain(painted: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", painted)


def painter() -> Painter:
    return Painter(Letters())  # type: ignore[arg-type]


def test_each_token_has_the_colour_of_its_proposer() -> None:
    p = painter()
    assert p.paint(delta("abc", "abc", ["ngram", "", "suffix"])) == f"{A}a{RESET}b{B}c{RESET}"
    assert p.paint(delta("d", "d", ["ngram"])) == f"{A}d{RESET}"
    assert p.legend() == (
        f"proposed by {A}ngram{RESET}, {B}suffix{RESET}; the rest by the model itself"
    )


def test_text_that_is_held_back_keeps_its_colour() -> None:
    p = painter()
    first = p.paint(delta("a", "abc", ["ngram", "ngram", ""]))  # `bc` may begin a stop string
    second = p.paint(delta("bcd", "d", [""]))
    assert (first, second) == (f"{A}a{RESET}", f"{A}b{RESET}cd")


def test_text_that_a_stop_string_cuts_is_not_shown() -> None:
    assert plain(painter().paint(delta("a", "abc", ["ngram"] * 3))) == "a"


def test_a_piece_may_be_given_out_in_parts() -> None:
    p = painter()
    painted = p.paint(delta("é", "0b", ["", "ngram"])) + p.paint(delta("b", "", []))
    assert painted == f"{A}é{RESET}{A}b{RESET}"


def test_text_flushed_at_the_end_belongs_to_no_token() -> None:
    assert painter().paint(delta("aé", "a0", ["ngram", "ngram"])) == f"{A}a{RESET}é"


def test_legend_without_drafts() -> None:
    p = painter()
    assert p.paint(delta("ab", "ab", ["", ""])) == "ab"
    assert p.legend() == "all tokens by the model itself"
