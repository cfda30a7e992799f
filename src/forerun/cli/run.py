"""`forerun generate`: one prompt, answered on stdout while it is written."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.answer import Answer
from forerun.cli.options import option
from forerun.cli.paint import Painter
from forerun.errors import ConfigError, PromptError
from forerun.tune.workloads import Prompt


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    speculative_config: options.SpeculativeConfig = None,
    verifier: options.Verifier = "follow",
    static: options.Static = False,
    max_draft_tokens: Annotated[
        int | None, option("Most tokens drafted for one pass; by default, as many as pay.")
    ] = None,
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
    stop: Annotated[list[str], option("End before this text; repeatable.", metavar="TEXT")] = [],  # noqa: B006
    stop_token_id: Annotated[
        list[int], option("End at this token; repeatable.", metavar="TOKEN_ID")
    ] = [],  # noqa: B006
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
    if raw and system is not None:
        raise ConfigError("--raw has no place for --system; write it into the prompt")
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
        seed=secrets.randbits(32) if seed is None else seed,  # drawn here, so that --json can tell
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_id),
        include_stop_str_in_output=include_stop_str_in_output,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logprobs=logprobs,
        skip_special_tokens=not special_tokens,
        speculation=None if max_draft_tokens is None else {"max_draft_tokens": max_draft_tokens},
    )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs needs a place to go: add --json")
    conversation = _conversation(_stdin() if prompt == "-" else prompt, system)

    from forerun.engine.cost_file import source
    from forerun.engine.llm import LLM
    from forerun.models import hub
    from forerun.verify import make_verifier

    options.check_draft(spec, model)
    loaded = hub.load(model, dtype, device)
    tokens = conversation.encode(loaded.tokenizer, raw)
    if not make_verifier(verifier).lossless:
        print(
            f"--verifier {verifier} is lossy: the text may differ from plain decoding's",
            file=sys.stderr,
        )
    llm = LLM(loaded, draft=spec, verifier=verifier, kv_tokens=kv_tokens, static=static)
    painter = Painter(loaded.tokenizer.stream(not special_tokens)) if show_drafts else None
    answer = Answer(llm, tokens, params)
    answer.follow(None if as_json else painter.paint if painter else lambda delta: delta.text)
    if as_json:
        asked = {
            "model": model,
            "draft": spec,
            "static": static,
            "verifier": verifier,
            "seed": params.seed,
            "costs": source(loaded.target),
        }
        print(json.dumps(asked | answer.to_dict(), ensure_ascii=False))
    else:
        answer.print_others()
    if painter:
        print(painter.legend(), answer.figures(), sep="\n", file=sys.stderr)
        if costs := source(loaded.target):
            print(f"costs of passes: {costs}", file=sys.stderr)
    if answer.interrupted:
        raise KeyboardInterrupt


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise PromptError("the prompt on stdin is not valid UTF-8; convert it first") from None


def _conversation(text: str, system: str | None) -> Prompt:
    if not text.strip():
        raise PromptError("the prompt is empty; write what to answer")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return Prompt("prompt", (*messages, {"role": "user", "content": text}))
