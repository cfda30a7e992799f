"""`forerun data`: prompts, and the target's answers to them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.options import option
from forerun.cli.progress import Progress
from forerun.errors import ConfigError, PromptError
from forerun.train.jsonl import Journal, read_records

if TYPE_CHECKING:
    from forerun.train.answers import Question, Record

app = typer.Typer(help="Make what drafts are trained on.", no_args_is_help=True)
NONE = "none"


@app.command()
def prompts(
    out: Annotated[Path, option("The file of prompts; what it holds is kept.", "--out")],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="JSONL with prompt, messages or turns; text with one prompt per line; or a "
            "folder that 'datasets' saved.",
            metavar="[FILE]...",
        ),
    ] = [],  # noqa: B006, typer wants it so
    write: Annotated[
        int | None, option("Have the model write prompts until there are this many.", metavar="N")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[
        list[str],
        option("With --write: a system turn that steers the topic; repeatable, taken in turn."),
    ] = [],  # noqa: B006
    keep_system: Annotated[
        bool, option("Keep the system turns in the prompts.", "--keep-system")
    ] = False,
    temperature: options.Temperature = 1.0,
    top_p: Annotated[float, option("Sample from the likeliest tokens that sum up to this.")] = 0.95,
    max_tokens: Annotated[int, option("Longest prompt to write, in tokens.")] = 256,
    batch: Annotated[int, option("How many prompts to write together.", metavar="N")] = 32,
    seed: Annotated[int, option("Same seed, same prompts.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Collect prompts, or have the model write its own.

    \b
        forerun data prompts questions.jsonl notes.txt --out prompts.jsonl
        forerun data prompts --write 1000 --system "You are a maths tutor." --out prompts.jsonl
    """
    if bool(files) == (write is not None):
        raise ConfigError("give files to collect prompts from, or --write N; one of the two")
    if write is None:
        _collect(files, out)
        return
    if write < 1 or batch < 1:
        raise ConfigError(f"--write {write} --batch {batch}: give numbers above 0")
    params = options.sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens)

    from forerun.engine.llm import LLM
    from forerun.train.filters import Seen
    from forerun.train.writing import Writer

    with Journal(out) as journal:
        seen, there, first = Seen(near=True), 0, 0
        for place, record in read_records(out):
            if not isinstance(record, dict) or not isinstance(record.get("attempt"), int):
                raise ConfigError(f"{place} was not written by --write; choose another --out")
            seen.add(record["messages"][-1]["content"])
            there, first = there + 1, record["attempt"] + 1
        if there >= write:
            print(f"{out} holds {there} prompts already", file=sys.stderr)
            return
        llm = LLM(model, dtype=dtype, device=device, max_num_seqs=batch)
        writer = Writer(llm, params, system, keep_system, batch, seed)
        dropped: Counter[str] = Counter()
        with Progress("prompts", write, there) as progress:
            for attempt, messages in writer.write(seen, first, dropped):
                journal.append({"messages": messages, "attempt": attempt})
                progress.add()
                if progress.done == write:
                    break
    _report(write - there, dropped)


@app.command()
def answers(
    prompts: Annotated[
        Path, typer.Argument(help="A file of 'forerun data prompts', or any that it reads.")
    ],
    out: Annotated[Path, option("The file of answers; what it holds is kept.", "--out")],
    model: options.Model = options.DEFAULT_MODEL,
    draft: Annotated[
        str, option("Who guesses ahead, as in generate; the answers are the same.", metavar="SPEC")
    ] = NONE,
    temperature: Annotated[
        list[float], option("0 takes the likeliest token; repeatable: every prompt at each.")
    ] = [0.0],  # noqa: B006
    top_p: options.TopP = None,
    max_tokens: Annotated[int, option("Longest answer, in tokens.")] = 192,
    batch: Annotated[int, option("How many prompts to answer together.", metavar="N")] = 32,
    seed: Annotated[int, option("Same seed, same answers.")] = 0,
    endpoint: Annotated[
        str | None,
        option("Ask a server instead, as http://localhost:8000/v1.", metavar="URL"),
    ] = None,
    served_model: Annotated[
        str | None, option("The name of the model at the endpoint.", metavar="NAME")
    ] = None,
    api_key_env: Annotated[
        str | None, option("Variable of the environment with the endpoint's key.", metavar="VAR")
    ] = None,
    concurrency: Annotated[int, option("How many requests to have at the endpoint.")] = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Have the target answer prompts; a run that was cut short goes on where it was.

    \b
        forerun data answers prompts.jsonl --out answers.jsonl --temperature 0 --temperature 0.8
        forerun data answers prompts.jsonl --out answers.jsonl \\
            --endpoint http://localhost:8000/v1 --served-model meta-llama/Llama-3.1-8B-Instruct
    """
    if batch < 1 or concurrency < 1:
        raise ConfigError(f"--batch {batch} --concurrency {concurrency}: give numbers above 0")
    params = [  # truncation says nothing about the likeliest token, and would make another question
        options.sampling(
            temperature=each, top_p=top_p if each else None, max_tokens=max_tokens, seed=seed
        )
        for each in temperature
    ]
    spec = None if draft == NONE else options.draft_spec(draft, None)
    key = _key(api_key_env)
    if endpoint and not served_model:
        raise ConfigError("--endpoint needs --served-model, the name of the model there")
    if not endpoint and (served_model or api_key_env):
        raise ConfigError("--served-model and --api-key-env belong to --endpoint; give it, too")

    from forerun.train.answers import Question, answered
    from forerun.train.prompts import has_text, read_prompts

    asked = [messages for messages in read_prompts(prompts) if has_text(messages)]
    questions = {
        q.id: q for messages in asked for each in params if (q := Question(messages, each))
    }
    if not questions:
        raise ConfigError(f"{prompts} holds no prompts; write one per line")
    left_out = _LeftOut()
    with Journal(out) as journal:
        total = len(questions)
        for there in answered(out, served_model or model):
            questions.pop(there, None)
        waiting = questions.values()
        records: Iterator[tuple[Record, int]] = iter(())
        if endpoint and served_model:
            from forerun.train.endpoint import Endpoint

            records = Endpoint(endpoint, served_model, key).answer(waiting, concurrency, left_out)
        elif waiting:
            from forerun.engine.llm import LLM
            from forerun.train.answers import answer

            llm = LLM(model, spec, dtype=dtype, device=device, max_num_seqs=batch)
            records = answer(llm, waiting, batch, left_out)
        with Progress("answers", total, total - len(waiting)) as progress:
            for record, tokens in records:
                journal.append(record)
                progress.add(tokens)
    left_out.report(total)


class _LeftOut:
    """Prompts that could not be answered."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, question: Question, error: PromptError) -> None:
        self.errors.append(f"{error} ({question.messages[0]['content'][:40]!r} ...)")

    def report(self, total: int) -> None:
        """Say how many. Raises `PromptError` if that were all."""
        if not self.errors:
            return
        if len(self.errors) == total:
            raise PromptError(f"no prompt could be answered; the first: {self.errors[0]}")
        print(f"{len(self.errors)} left out; the first: {self.errors[0]}", file=sys.stderr)


def _collect(files: list[Path], out: Path) -> None:
    """Add the prompts of the files that are new to `out`."""
    from forerun.train.filters import Seen
    from forerun.train.prompts import has_text, read_prompts

    dropped: Counter[str] = Counter()
    seen, added = Seen(), 0
    with Journal(out) as journal:
        for messages in read_prompts(out):
            seen.add(_text(messages))
        for file in files:
            for messages in read_prompts(file):
                why = seen.add(_text(messages)) if has_text(messages) else "empty"
                if why:
                    dropped[why] += 1
                else:
                    journal.append({"messages": messages})
                    added += 1
    if not added and not dropped:
        raise ConfigError(f"no prompts in {', '.join(map(str, files))}; write one per line")
    _report(added, dropped)


def _text(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _report(added: int, dropped: Counter[str]) -> None:
    """Say what became of all that came."""
    share = dropped.total() / max(added + dropped.total(), 1)
    reasons = ", ".join(f"{count} {why}" for why, count in dropped.most_common())
    print(
        f"{added} prompts added, {share:.0%} dropped" + (f": {reasons}" if reasons else ""),
        file=sys.stderr,
    )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"--api-key-env {variable}: this variable is not set; export it")
    return key
