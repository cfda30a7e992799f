"""`forerun generate` on a random model: the answer, its forms, and everything that can be wrong."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.cli.main import main
from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.outputs import Delta
from tiny import VOCAB, tiny_folder

GREEDY = ["--max-tokens", "24", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


class Run:
    """One command line and what came of it."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        self.code = main(["generate", *arguments])
        self.out, self.err = capsys.readouterr()


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must fail."""
    run = Run(capsys, *arguments)
    assert run.code != 0
    assert run.out == ""
    assert run.err.startswith("error: ")
    assert run.err.count("\n") == 1
    return run.err


def test_answer_on_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str], model: str) -> None:
    run = Run(capsys, "Hello", "--model", model, *GREEDY)
    assert (run.code, run.err) == (0, "")
    llm = LLM(model, dtype="float32", device="cpu")
    tokens = llm.tokenizer.chat([{"role": "user", "content": "Hello"}])
    expected = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=24))
    text = expected[0].outputs[0].text
    assert run.out == text if text.endswith("\n") else text + "\n"


@pytest.mark.parametrize(
    "sampling", [[], ["--temperature", "0.8", "--top-p", "0.9", "--seed", "5"]]
)
def test_text_does_not_depend_on_the_draft(
    capsys: pytest.CaptureFixture[str], model: str, sampling: list[str]
) -> None:
    drafts = ["none", "ngram", "suffix", "ngram:k=3+suffix"]
    texts = [
        Run(capsys, "abab", "--model", model, *GREEDY, *sampling, "--draft", draft).out
        for draft in drafts
    ]
    assert texts[1:] == texts[:1] * 3


def test_vllm_configuration_names_the_same_draft(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--json", "--speculative-config", config)
    assert json.loads(run.out)["draft"] == config
    error = fails(capsys, "x", "--model", model, "--draft", "ngram", "--speculative-config", config)
    assert "give one of them" in error


def test_prompt_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    direct = Run(capsys, "Hello", "--model", model, *GREEDY).out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert Run(capsys, "-", "--model", model, *GREEDY).out == direct


def test_prompt_forms_differ(capsys: pytest.CaptureFixture[str], model: str) -> None:
    def length(*form: str) -> int:
        out = Run(capsys, "Hello", "--model", model, *GREEDY, "--json", *form).out
        return int(json.loads(out)["prompt_tokens"])

    assert length("--raw") == len("Hello")
    assert length() > length("--raw")
    assert length("--system", "Be short.") > length("--system", "") > length()


def test_json_holds_all_figures(capsys: pytest.CaptureFixture[str], model: str) -> None:
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--json", "--logprobs", "2", "--n", "2")
    result = json.loads(run.out)
    assert run.err == ""
    assert [output["index"] for output in result["outputs"]] == [0, 1]
    first = result["outputs"][0]
    assert len(first["token_ids"]) == len(first["sources"]) == len(first["logprobs"]) == 24
    assert all(len(entry["top"]) == 2 for entry in first["logprobs"])
    assert first["finish_reason"] == "length"
    assert result["stats"]["emitted_tokens"] == 48
    assert 0 < result["ttft_s"] <= result["seconds"]
    assert result["tok_s"] == pytest.approx(48 / result["seconds"])


def test_drafts_may_be_limited(capsys: pytest.CaptureFixture[str], model: str) -> None:
    options = ["ab ab ab ab ", "--model", model, *GREEDY, "--json", "--static"]
    few = json.loads(Run(capsys, *options, "--max-draft-tokens", "1").out)
    many = json.loads(Run(capsys, *options).out)
    assert few["outputs"][0]["token_ids"] == many["outputs"][0]["token_ids"]
    assert few["stats"]["draft_tokens"] == few["stats"]["drafts"] <= many["stats"]["draft_tokens"]
    assert "max_draft_tokens: should be greater" in fails(capsys, "x", "--max-draft-tokens", "0")


def test_json_tells_the_seed_that_was_drawn(capsys: pytest.CaptureFixture[str], model: str) -> None:
    options = ["abab", "--model", model, *GREEDY, "--json", "--temperature", "1"]
    first = json.loads(Run(capsys, *options).out)
    again = json.loads(Run(capsys, *options, "--seed", str(first["seed"])).out)
    assert again["outputs"][0]["token_ids"] == first["outputs"][0]["token_ids"]


def test_several_answers(capsys: pytest.CaptureFixture[str], model: str) -> None:
    sampling = ["--temperature", "1", "--seed", "1", "--n", "3"]
    result = json.loads(Run(capsys, "abab", "--model", model, *GREEDY, *sampling, "--json").out)
    texts = [output["text"] for output in result["outputs"]]
    assert len(set(texts)) == 3
    out = Run(capsys, "abab", "--model", model, *GREEDY, *sampling).out
    assert out.startswith(texts[0])
    assert f"--- 2 of 3\n{texts[1]}\n--- 3 of 3\n{texts[2]}\n" in out


def test_show_drafts_colours_the_same_text(capsys: pytest.CaptureFixture[str], model: str) -> None:
    options = ["abab", "--model", model, "--max-tokens", "60", "--draft", "suffix"]
    plain = Run(capsys, *options).out
    shown = Run(capsys, *options, "--show-drafts")
    assert re.sub(r"\x1b\[\d+m", "", shown.out) == plain
    legend, figures, costs = shown.err.splitlines()
    assert costs == "costs of passes: measured"
    assert "model itself" in legend
    assert figures.startswith("60 tokens in ")
    for name in ("tok/s", "mean acceptance length", "acceptance rate", "tokens per pass"):
        assert name in figures


def test_lossy_rule_is_called_so(capsys: pytest.CaptureFixture[str], model: str) -> None:
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--verifier", "typical")
    assert run.code == 0
    assert run.err == "--verifier typical is lossy: the text may differ from plain decoding's\n"


def test_stop_string_ends_the_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    whole = Run(capsys, "abab", "--model", model, *GREEDY).out
    # Random bytes end in characters that never become complete; those stop nothing.
    stop = next(whole[i : i + 2] for i in range(3, len(whole)) if whole[i : i + 2].isascii())
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--stop", stop)
    assert run.out == whole[: whole.index(stop)] + "\n"


def test_logit_bias_forces_a_token(capsys: pytest.CaptureFixture[str], model: str) -> None:
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--logit-bias", f"{ord('z')}=100")
    assert run.out == "z" * 24 + "\n"


def test_ctrl_c_keeps_what_has_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    real = LLM.stream

    def interrupted(self: LLM, *arguments: Any) -> Iterator[Delta]:
        for count, delta in enumerate(real(self, *arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield delta

    whole = Run(capsys, "abab", "--model", model, *GREEDY, "--draft", "none").out
    monkeypatch.setattr(LLM, "stream", interrupted)
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--draft", "none")
    assert (run.code, run.err) == (130, "error: interrupted\n")
    assert 0 < len(run.out.rstrip("\n")) <= 3
    assert whole.startswith(run.out.rstrip("\n"))
    run = Run(capsys, "abab", "--model", model, *GREEDY, "--draft", "none", "--json")
    assert run.code == 130
    output = json.loads(run.out)["outputs"][0]
    assert (len(output["token_ids"]), output["finish_reason"]) == (3, "abort")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "max_tokens: should be greater than or equal to 1 (got 0)"),
        (["--temperature", "-1"], "temperature: should be greater than or equal to 0 (got -1.0)"),
        (["--top-p", "1.5"], "top_p: should be less than or equal to 1 (got 1.5)"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--logit-bias", "x"], "write TOKEN_ID=BIAS"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--logprobs", "2"], "add --json"),
        (["--verifier", "folow"], "did you mean 'follow'?"),
        (["--draft", "sufix"], "did you mean 'suffix'?"),
        (["--draft", "ngram:maxx=3"], "did you mean 'max'?"),
        (["--draft", ""], "lacks a drafter"),
        (["--speculative-config", "{"], "no valid JSON"),
        (["--speculative-config", ""], "is no JSON object"),
        (["--speculative-config", "ngram"], "is no JSON object"),
        (["--raw", "--system", "x"], "--raw has no place for --system"),
        (["--dtype", "bfloat61"], "did you mean 'bfloat16'?"),
        (["--device", "gpu"], "there is no device 'gpu'"),
        (["--kv-tokens", "999999999999"], "key/value store"),
        (["--kv-tokens", "0"], "key/value store"),
        (["--kv-tokens", "16"], "prompt"),
    ],
)
def test_options_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], model: str, options: list[str], message: str
) -> None:
    assert message in fails(capsys, "Hello", "--model", model, *options)


def test_prompts_that_cannot_be_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    assert "the prompt is empty" in fails(capsys, " ", "--model", model)
    assert "not valid UTF-8" in fails(capsys, "caf\udce9", "--model", model)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert "not valid UTF-8" in fails(capsys, "-", "--model", model)
    assert "512" in fails(capsys, "x" * 600, "--model", model)


def test_models_that_do_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'smollm2-135m'?" in fails(capsys, "x", "--model", "smollm-135m")
    assert "check the path" in fails(capsys, "x", "--model", str(tmp_path / "none.gguf"))
    assert "no config.json" in fails(capsys, "x", "--model", str(tmp_path))


def test_draft_model_with_another_vocabulary(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    other = tiny_folder(tmp_path / "other", vocab=VOCAB + 5)
    error = fails(capsys, "x", "--model", model, "--draft", f"model:{other}")
    assert "vocabular" in error


class Broken:
    """A copy of the model that a test may damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = tiny_folder(folder)
        self.weights = self.folder / "model.safetensors"

    def change(self, **tensors: torch.Tensor | None) -> None:
        """Replace, add or (None) take out tensors; `__` stands for a dot in their names."""
        weights = load_file(self.weights)
        for name, tensor in tensors.items():
            key = name.replace("__", ".")
            if tensor is None:
                del weights[key]
            else:
                weights[key] = tensor
        save_file(weights, self.weights)


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path / "broken")


def test_truncated_weights(capsys: pytest.CaptureFixture[str], broken: Broken) -> None:
    broken.weights.write_bytes(broken.weights.read_bytes()[:-100])
    error = fails(capsys, "x", "--model", str(broken.folder))
    assert "model.safetensors is cut short or damaged" in error


def test_missing_tensor(capsys: pytest.CaptureFixture[str], broken: Broken) -> None:
    broken.change(model__norm__weight=None)
    error = fails(capsys, "x", "--model", str(broken.folder))
    assert "has no tensor 'model.norm.weight'" in error


def test_unexpected_tensor(capsys: pytest.CaptureFixture[str], broken: Broken) -> None:
    broken.change(model__extra__weight=torch.zeros(3))
    error = fails(capsys, "x", "--model", str(broken.folder))
    assert "does not use: 'model.extra.weight'" in error


def test_tensor_of_another_shape(capsys: pytest.CaptureFixture[str], broken: Broken) -> None:
    broken.change(model__norm__weight=torch.ones(7))
    error = fails(capsys, "x", "--model", str(broken.folder))
    assert "'model.norm.weight' has shape [7]" in error


def test_truncated_gguf(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 20)
    assert "cut short or damaged" in fails(capsys, "x", "--model", str(path))
