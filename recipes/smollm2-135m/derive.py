"""Prompts that hand the model a text: to shorten, translate, ask about or edit.

`python derive.py answers.jsonl --out derived.jsonl --without PROMPTS...`

A model that is asked for prompts of its own hardly writes any that bring a text along, and a draft
that has seen none copies nothing. The texts come from answers that the model gave (`forerun data
answers`), the code from Python's standard library (whose version therefore matters a little).
Prompts that share a run of eight words with those of `--without` are left out.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

RUN = 8  # words in a row that two prompts must not share
LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "French", "Spanish")
SUMMARISE = (
    "Summarise the following text in {} sentences.\n\n{}",
    "Give a short summary of this text in {} sentences.\n\n{}",
    "Write a headline for this text and then {} sentences that sum it up:\n\n{}",
    "List the {} main points of this text.\n\n{}",
    "What does this text say? Answer in {} sentences.\n\nText: {}",
)
TRANSLATE = (
    'Translate into {}: "{}"',
    "Translate this text into {}.\n\n{}",
    "Please give me the {} translation of this: {}",
    "Translate the sentences into {}, one per line:\n{}",
)
ASK = (
    "Read the text and answer the question.\n\nText: {text}\n\nQuestion: {question}",
    "Use only the information below to answer.\n\n{text}\n\nQuestion: {question}",
    "Text: {text}\n\nQuestion: {question} Explain your answer with the text.",
    "{text}\n\n{question} Quote the words from the text that say so.",
)
QUESTIONS = (
    "What is the text about?",
    "Which examples does the text give?",
    "What does the first sentence say?",
    "Which two facts in the text matter most?",
)
EDIT = (
    "Rewrite this code with the function `{name}` renamed to `{other}`. Change nothing else.",
    "Add a docstring to the function `{name}` and answer with the whole code.",
    "Add type hints to `{name}`. Answer with the whole code.",
    "Add a comment above every `if` in this code. Answer with the whole code.",
    "Rename the function `{name}` to `{other}` everywhere. Answer with the whole file.",
)
READ = (
    "Explain step by step what this function does.",
    "Write a test for this function with pytest.",
    "Find the bug in this code, if there is one, and give the mended code.",
)


def texts(answers: list[dict[str, object]], draw: random.Random) -> Iterator[tuple[str, str]]:
    """The question and the answer of texts in plain sentences, in a drawn order."""
    for row in draw.sample(answers, len(answers)):
        asked, answered = (m["content"].strip() for m in row["messages"][-2:])  # type: ignore
        if "```" not in answered and row["finish"][-1] == "stop" and len(answered) > 200:  # type: ignore
            yield asked, answered


def summaries(answers: list[dict[str, object]], draw: random.Random) -> Iterator[str]:
    for _, text in texts(answers, draw):
        if len(text) > 500:
            yield draw.choice(SUMMARISE).format(draw.choice(("two", "three", "four")), text[:1800])


def translations(answers: list[dict[str, object]], draw: random.Random) -> Iterator[str]:
    for _, text in texts(answers, draw):
        parts = re.split(r"(?<=[.!?])\s+", text)
        first = draw.randrange(len(parts))
        piece = parts[first : first + draw.randint(1, 3)]
        form = draw.choice(TRANSLATE)
        joined = ("\n" if "per line" in form else " ").join(piece)
        if 40 < len(joined) < 500:
            yield form.format(draw.choice(LANGUAGES), joined)


def questions(answers: list[dict[str, object]], draw: random.Random) -> Iterator[str]:
    for asked, text in texts(answers, draw):
        own = asked.endswith("?") and len(asked) < 200 and draw.random() < 0.7
        question = asked if own else draw.choice(QUESTIONS)
        yield draw.choice(ASK).format(text=text[:1500], question=question)


def functions(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Name and code of functions of the standard library, 6 to 40 lines each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for file in draw.sample(files, len(files)):
        code = file.read_text(errors="ignore")
        found = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef)]
        for node in draw.sample(found, min(len(found), 8)):
            lines = code.splitlines()[node.lineno - 1 : node.end_lineno]
            if 6 <= len(lines) <= 40 and not node.name.startswith("__"):
                yield node.name, textwrap.dedent("\n".join(lines))


def edits(draw: random.Random) -> Iterator[str]:
    for name, code in functions(draw):
        other = draw.choice(("run", "convert", "find", "build", "read", "apply")) + "_" + name
        task = draw.choice(EDIT if draw.random() < 0.75 else READ)
        yield f"{task.format(name=name, other=other.replace('__', '_'))}\n\n```python\n{code}\n```"


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def texts_in(value: object) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def taken_by(files: list[Path]) -> set[tuple[str, ...]]:
    """The runs of all texts in JSONL files."""
    return {
        run
        for file in files
        for line in file.read_text().splitlines()
        for text in texts_in(json.loads(line))
        for run in runs(text)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Derive prompts that bring a text along.")
    parser.add_argument("answers", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=650, help="prompts of each of the four kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    draw = random.Random(options.seed)
    answers = [json.loads(line) for line in options.answers.read_text().splitlines()]
    taken = taken_by(options.without)
    kinds: list[Callable[[], Iterator[str]]] = [
        lambda: summaries(answers, draw),
        lambda: translations(answers, draw),
        lambda: questions(answers, draw),
        lambda: edits(draw),
    ]
    prompts = [
        prompt
        for kind in kinds
        for prompt in itertools.islice(
            (p for p in kind() if taken.isdisjoint(runs(p))), options.each
        )
    ]
    draw.shuffle(prompts)
    options.out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
