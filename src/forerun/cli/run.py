"""`forerun generate`: one prompt, answered on stdout while it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.options import option
from forerun.cli.paint import Painter
from forerun.engine.outputs import Completion, Delta
from forerun.errors import ConfigError, PromptError
from forerun.tune.workloads import Prompt

if TYPE_CHECKING:
    from forerun.core import SamplingParams
    from forerun.engine.llm import LLM


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    speculative_config: options.SpeculativeConfig = None,
    verifier: options.Verifier = "follow",
    system: Annotated[str | None, option("Instruction that stands before the prompt.")] = None,
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    n: Annotated[int | None, option("How many answers.", "-n", "--n")] = None,
    repetition_penalty: Annotated[
        float | None, option("Above 1: tokens of the prompt and the answer become less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, option("Above 0: tokens of the answer become less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, option("Above 0: the more often a token came, the less likely it becomes.")
    ] = None,
    logit_bias: Annotated[
        list[str], option("Add to the logit of a token; repeatable.", metavar="TOKEN_ID=BIAS")
    ] = [],  # noqa: B006, typer wants it so
    stop: Annotated[list[str], option("End before this text; repeatable.")] = [],  # noqa: B006
    stop_token_id: Annotated[list[int], option("End at this token; repeatable.")] = [],  # noqa: B006
    include_stop_str_in_output: Annotated[
        bool, option("Show the stop string, too.", "--include-stop-str-in-output")
    ] = False,
    ignore_eos: options.IgnoreEos = False,
    min_tokens: Annotated[int | None, option("Shortest answer, in tokens.")] = None,
    logprobs: Annotated[
        int | None, option("With --json: log-probabilities of the tokens and of this many others.")
    ] = None,
    special_tokens: Annotated[
        bool, option("Show special tokens in the text.", "--special-tokens")
    ] = False,
    show_drafts: Annotated[
        bool, option("Colour each token by who proposed it; figures at the end.", "--show-drafts")
    ] = False,
    as_json: Annotated[bool, option("Print one JSON object at the end instead.", "--json")] = False,
    kv_tokens: options.KvTokens = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Answer a prompt. The text does not depend on --draft, the speed does.

    \b
        forerun generate "Why is the sky blue?"
        forerun generate "Write a haiku" --temperature 0.8 --seed 1 --show-drafts
        cat letter.txt | forerun generate - --system "Summarise the text."
    """
    spec = options.draft_spec(draft, speculative_config)
    params = options.sampling(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=options.logit_bias(logit_bias),
        seed=seed,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_id),
        include_stop_str_in_output=include_stop_str_in_output,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logprobs=logprobs,
        skip_special_tokens=not special_tokens,
    )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs needs a place to go: add --json")
    conversation = _conversation(sys.stdin.read() if prompt == "-" else prompt, system)

    from forerun.engine.llm import LLM
    from forerun.models import hub

    loaded = hub.load(model, dtype, device)
    tokens = conversation.encode(loaded.tokenizer, raw)
    llm = LLM(loaded, draft=spec, verifier=verifier, kv_tokens=kv_tokens)
    painter = Painter(loaded.tokenizer.stream(not special_tokens)) if show_drafts else None
    answer = Answer(llm, tokens, params)
    answer.follow(None if as_json else painter.paint if painter else lambda delta: delta.text)
    if as_json:
        names = {"model": model, "draft": spec, "verifier": verifier}
        print(json.dumps(names | answer.to_dict(), ensure_ascii=False))
    else:
        answer.print_others()
    if painter:
        print(painter.legend(), answer.figures(), sep="\n", file=sys.stderr)
    if answer.interrupted:
        raise KeyboardInterrupt


def _conversation(text: str, system: str | None) -> Prompt:
    if not text.strip():
        raise PromptError("the prompt is empty; write what to answer")
    messages = [{"role": "system", "content": system}] if system else []
    return Prompt("prompt", (*messages, {"role": "user", "content": text}))


class Answer:
    """The outputs for one prompt, as far as they have come."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.llm = llm
        self.prompt = prompt
        self.params = params
        self.outputs = [Completion(index) for index in range(params.n)]
        self.seconds = self.ttft_s = 0.0
        self.interrupted = False

    def follow(self, show: Callable[[Delta], str] | None) -> None:
        """Let the model write; the first output is printed as it comes, in the form `show` gives
        it. Ctrl-C ends it early and keeps what there is."""
        begin = perf_counter()
        try:
            for delta in self.llm.stream(self.prompt, self.params):
                self.seconds = perf_counter() - begin
                self.ttft_s = self.ttft_s or self.seconds
                self.outputs[delta.index].append(delta)
                if show and delta.index == 0:
                    print(show(delta), end="", flush=True)
        except KeyboardInterrupt:
            self.interrupted = True
            for output in self.outputs:
                output.finish_reason = output.finish_reason or "abort"
        if show and not self.outputs[0].text.endswith("\n"):
            print()

    def print_others(self) -> None:
        """Print the outputs behind the first, each under a line with its number."""
        for output in self.outputs[1:]:
            print(f"--- {output.index + 1} of {len(self.outputs)}", output.text, sep="\n")

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def figures(self) -> str:
        """Speed and acceptance in one line."""
        stats = self.llm.stats
        return (
            f"{self.tokens} tokens in {self.seconds:.1f} s with the prompt, "
            f"{self.tokens / max(self.seconds, 1e-9):.1f} tok/s | "
            f"mean acceptance length {stats.acceptance_length:.2f}, "
            f"acceptance rate {stats.acceptance_rate:.0%}, "
            f"{stats.tokens_per_pass:.2f} tokens per pass"
        )

    def to_dict(self) -> dict[str, Any]:
        stats = self.llm.stats
        return {
            "prompt_tokens": len(self.prompt),
            "outputs": [asdict(output) for output in self.outputs],
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "tok_s": self.tokens / max(self.seconds, 1e-9),
            "stats": asdict(stats)
            | {
                "acceptance_length": stats.acceptance_length,
                "acceptance_rate": stats.acceptance_rate,
                "tokens_per_pass": stats.tokens_per_pass,
            },
        }
