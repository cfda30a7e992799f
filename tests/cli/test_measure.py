"""`forerun bench` on a random model: table, JSON, page, and what happens when it is cut short."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.engine.llm import LLM
from forerun.tune.workloads import load_workload
from tiny import tiny_folder

TINY = ["--dtype", "float32", "--device", "cpu", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "abab"}, {"prompt": "Hello"}, {"turns": ["one", "two"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_table_json_and_page(
    capsys: pytest.CaptureFixture[str], model: str, prompts: str, tmp_path: Path
) -> None:
    results, html = tmp_path / "results.json", tmp_path / "results.html"
    arguments = ["bench", "--model", model, "--workload", prompts, *TINY, "--batch", "1,2"]
    drafts = ["--draft", "ngram", "--draft", "suffix:k=4"]
    assert main([*arguments, *drafts, "--json", str(results), "--html", str(html)]) == 0
    out, err = capsys.readouterr()
    digest = load_workload(prompts).hash
    assert err == (
        f"mine: 3 prompts, hash {digest}; of 1 with several turns only the first is used\n"
    )
    written = json.loads(results.read_text())
    rows, meta = written["rows"], written["meta"]
    assert [(row["spec"], row["method"], row["batch"]) for row in rows] == [
        ("none", "none", 1),
        ("ngram", "ngram", 1),
        ("suffix:k=4", "suffix", 1),
        ("none", "none", 2),
        ("ngram", "ngram", 2),
        ("suffix:k=4", "suffix", 2),
    ]
    for row in rows:
        assert (row["output_tokens"], row["prompts"], row["dtype"]) == (36, 3, "float32")
        compared = 0 if row["spec"] == "none" else 3
        assert (row["identical"], row["prompts_compared"]) == (compared, compared)
        assert row["speedup"] == pytest.approx(row["tok_s"] / row["plain_tok_s"])
    assert meta["workloads"] == {"mine": {"hash": digest, "prompts": 3}}
    assert meta["sampling"]["max_tokens"] == 12
    assert meta["versions"]["forerun"]
    for row in rows:
        assert f"{row['tok_s']:.1f}" in out
    assert "Same tokens as plain decoding: 12 of 12 answers" in out
    check_page(html.read_text(), rows)


class Page(HTMLParser):
    """Collects what a page shows and what it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.charts = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_page(html: str, rows: list[dict[str, Any]]) -> None:
    page = Page(html)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"<script|@import|url\(", html)
    curves = {row["batch"] for row in rows if row["acceptance_per_position"]}
    assert page.charts == 2 + len(curves)
    text = " ".join(page.texts)
    for row in rows:
        assert f"{row['speedup']:.2f}x" in text
        assert row["spec"] in text


def test_json_to_stdout_moves_the_table(
    capsys: pytest.CaptureFixture[str], model: str, prompts: str
) -> None:
    arguments = ["bench", "--model", model, "--workload", prompts, "--prompts", "1", *TINY]
    assert main([*arguments, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert [row["spec"] for row in json.loads(out)["rows"]] == ["none", "suffix"]
    assert "speed-up" in err


def test_results_say_what_the_verifier_keeps(
    capsys: pytest.CaptureFixture[str], model: str, prompts: str
) -> None:
    def last_line(*options: str) -> str:
        arguments = ["bench", "--model", model, "--workload", prompts, "--prompts", "1", *TINY]
        assert main([*arguments, *options]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    sampled = ("--temperature", "1")
    assert "follow keeps the text" in last_line(*sampled)
    assert "rejection keeps the text" in last_line("--verifier", "rejection")
    assert "keeps the distribution" in last_line("--verifier", "rejection", *sampled)
    assert "typical is lossy" in last_line("--verifier", "typical", *sampled)


def test_names_in_a_page_are_escaped(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "<b>&.txt"
    prompts.write_text("abab\n")
    html = tmp_path / "page.html"
    assert (
        main(["bench", "--model", model, "--workload", str(prompts), *TINY, "--html", str(html)])
        == 0
    )
    assert "<b>" not in html.read_text()
    assert "&lt;b&gt;&amp;" in html.read_text()


def test_ctrl_c_shows_and_writes_what_is_finished(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    prompts: str,
    tmp_path: Path,
) -> None:
    real, calls = LLM.generate, []

    def interrupted(self: LLM, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 + 4 + 2:  # two warm-ups, two prompts done, one draft on the third
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(LLM, "generate", interrupted)
    results = tmp_path / "results.json"
    arguments = ["bench", "--model", model, "--workload", prompts, *TINY, "--json", str(results)]
    assert main(arguments) == 130
    out, err = capsys.readouterr()
    assert "speed-up" in out
    assert err.endswith("error: interrupted\n")
    assert [row["prompts"] for row in json.loads(results.read_text())["rows"]] == [2, 2]


def test_ctrl_c_before_the_first_result_writes_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    prompts: str,
    tmp_path: Path,
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    results = tmp_path / "results.json"
    arguments = ["bench", "--model", model, "--workload", prompts, *TINY, "--json", str(results)]
    assert main(arguments) == 130
    assert capsys.readouterr().out == ""
    assert not results.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "code_edit"], "code, code-edit, summarise"),
        (["--batch", "1;8"], "write numbers with commas, as 1,8"),
        (["--batch", "0"], "1 or more"),
        (["--repeat", "0"], "1 or more"),
        (["--prompts", "0"], "give 1 or more"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--draft", "sufix"], "did you mean 'suffix'?"),
        (["--verifier", "folow"], "did you mean 'follow'?"),
        (["--draft", "ngram:mx=3"], "did you mean 'max'?"),
        (["--draft", ""], "lacks a drafter"),
        (["--json", "."], ". is a folder"),
        (["--html", "/proc/forerun.html"], "cannot write /proc/forerun.html"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--workload", "summarise"], "prompt summarise-01 of summarise has"),
        (["--kv-tokens", "20"], "prompt"),
    ],
)
def test_options_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
    model: str,
    prompts: str,
    options: list[str],
    message: str,
) -> None:
    workload = [] if "--workload" in options else ["--workload", prompts]
    assert main(["bench", "--model", model, *workload, *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options",
    [
        ["--draft", "ngrm"],
        ["--draft", "ngram:mx=3"],
        ["--batch", "0"],
        ["--repeat", "0"],
        ["--verifier", "folow"],
        ["--json", "."],
    ],
)
def test_wrong_options_are_seen_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], prompts: str, options: list[str]
) -> None:
    assert main(["bench", "--model", "/no/such/model", "--workload", prompts, *options]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "/no/such/model" not in err


def test_a_batch_size_is_measured_once_and_an_old_file_is_kept_until_then(
    model: str, prompts: str, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    results.write_text("old")
    arguments = ["bench", "--workload", prompts, *TINY, "--prompts", "2", "--json", str(results)]
    assert main([*arguments, "--model", "/no/such/model"]) == 1
    assert results.read_text() == "old"
    assert main([*arguments, "--model", model, "--batch", "1,1"]) == 0
    rows = json.loads(results.read_text())["rows"]
    assert [(row["batch"], row["prompts"]) for row in rows] == [(1, 2), (1, 2)]


def test_a_trace_is_written_and_can_be_replayed(
    capsys: pytest.CaptureFixture[str], model: str, prompts: str, tmp_path: Path
) -> None:
    trace, results = tmp_path / "drafts.jsonl", tmp_path / "replay.json"
    arguments = ["bench", "--model", model, "--workload", prompts, *TINY, "--ignore-eos"]
    assert main([*arguments, "--draft", "ngram:k=3", "--trace", str(trace)]) == 0
    source, *texts = map(json.loads, trace.read_text().splitlines())
    assert (source["draft"], source["workloads"]) == ("ngram:k=3", ["mine"])
    assert [len(text["steps"]) for text in texts] == [11, 11, 11]
    capsys.readouterr()
    command = ["simulate", "h100-eagle", "--trace", str(trace), "--batch", "1,2", "--static", "3"]
    assert main([*command, "--json", str(results)]) == 0
    assert "ngram:k=3 on mine" in capsys.readouterr().out
    rows = json.loads(results.read_text())["rows"]
    assert [(row["batch"], row["draft"]) for row in rows] == [
        (batch, draft) for batch in (1, 2) for draft in ("none", "3", "plan")
    ]
    assert all(row["published"] is None for row in rows), "that was another drafter"


@pytest.mark.parametrize("more", [["--draft", "ngram"], ["--verifier", "rejection"]])
def test_a_trace_needs_one_draft_and_the_text_of_plain_decoding(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, more: list[str]
) -> None:
    arguments = ["bench", "--model", model, "--draft", "suffix", *more]
    assert main([*arguments, "--trace", str(tmp_path / "t.jsonl")]) == 1
    assert "--trace records one --draft" in capsys.readouterr().err


def test_a_sweep_goes_to_a_file_and_goes_on(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("forerun.tune.sweep.BUILT_IN", ("chat",))
    monkeypatch.setattr("forerun.tune.sweep.BATCHES", (2,))
    monkeypatch.setattr("forerun.tune.sweep.TOKENS", 6)
    file = tmp_path / "sweep.jsonl"
    command = ["bench", "--model", model, "--dtype", "float32", "--device", "cpu"]
    command += ["--sweep", str(file), "--budget", "1s"]
    assert main(command) in (0, 1)  # a machine may be slow
    out, err = capsys.readouterr()
    assert "12 cells, 0 begun" in err
    assert "Texts that are not those of plain decoding: 0." in out
    first = file.read_text()
    assert main(command) in (0, 1)
    assert file.read_text().startswith(first)
    assert len(first.splitlines()) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sweep", "s.jsonl", "--draft", "ngram"], "leave out --draft"),
        (["--sweep", "s.jsonl", "--json", "x.json"], "leave out --json"),
        (["--budget", "1h"], "--budget says how long --sweep may take"),
        (["--sweep", "."], ". is a folder"),
    ],
)
def test_what_a_sweep_cannot_be_told(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "--model", "/no/such/model", *options]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
