"""Two prompts, each answered plainly and with speculation: the same text, at two speeds.

python scripts/demo.py --model smollm2-135m --draft suffix
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Annotated

import typer

from forerun.cli.options import DEFAULT_DRAFT
from forerun.cli.paint import Painter
from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.errors import ForerunError
from forerun.interop import shipped
from forerun.models import hub
from forerun.tune.workloads import load_workload

PROMPTS = {"code-edit": 1, "chat": 0}  # much of the answer stands in the prompt; nothing of it
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def main(
    model: Annotated[str, typer.Option(help="As in 'forerun generate'.")] = "smollm2-135m",
    draft: Annotated[
        str | None,
        typer.Option(
            help="As in 'forerun generate'; by default, the best that ships for the model."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 160,
) -> None:
    """Answer prompts plainly and with speculation; exit with 1 if a text differs that must not."""
    draft = draft or shipped.BEST.get(model, DEFAULT_DRAFT)
    loaded = hub.load(model)
    info = loaded.target.info
    exact = info.row_invariant and info.tree_invariant
    plain, fast = LLM(loaded), LLM(loaded, draft=draft)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for llm in (plain, fast):
        llm.generate("warm up", SamplingParams(temperature=0, max_tokens=8))
    failed = False
    for name, index in PROMPTS.items():
        prompt = load_workload(name).prompts[index]
        ids = prompt.encode(loaded.tokenizer)
        title(f"{name}: {prompt.messages[-1]['content'].splitlines()[0]}")
        plain_text, plain_speed = answer(plain, ids, params, "plain decoding")
        fast_text, fast_speed = answer(fast, ids, params, f"speculation with {draft}")
        same = plain_text == fast_text
        failed |= exact and not same
        title(
            f"{'same text' if same else 'another text'}, {fast_speed / plain_speed:.2f}x "
            f"the speed ({plain_speed:.0f} -> {fast_speed:.0f} tokens/s, prompt included)"
        )
    if not exact:
        print("Rows are not computed independently here, so near ties may fall the other way.")
        print("The compiled kernels, for which a C compiler (gcc or clang) is needed, avoid that.")
    raise typer.Exit(int(failed))


def answer(llm: LLM, ids: list[int], params: SamplingParams, label: str) -> tuple[str, float]:
    """Write an answer to the screen as it comes; returns its text and tokens per second.

    Tokens that the drafter proposed are coloured.
    """
    painter = Painter(llm.tokenizer.stream())
    print(f"{styled(f'--- {label}', DIM)}")
    text, tokens, begin = "", 0, perf_counter()
    for delta in llm.stream(ids, params):
        print(painter.paint(delta) if sys.stdout.isatty() else delta.text, end="", flush=True)
        text += delta.text
        tokens += len(delta.token_ids)
    seconds = perf_counter() - begin
    print(f"\n{styled(f'--- {tokens} tokens in {seconds:.2f} s', DIM)}")
    return text, tokens / seconds


def title(text: str) -> None:
    print(f"\n{styled(text, BOLD)}\n")


def styled(text: str, style: str) -> str:
    return f"{style}{text}{RESET}" if sys.stdout.isatty() else text


if __name__ == "__main__":
    try:
        typer.run(main)
    except ForerunError as error:
        sys.exit(f"error: {error}")
