"""Prompts of the kinds that people ask, from forms with gaps.

`python compose.py --out composed.jsonl --without PROMPTS...`

A small model that writes its own prompts seldom asks for what people ask for. Forms and gaps are in
forms.json, with how many prompts of each kind to write: `{who}` is one of that list, `{n:2-40}` a
number, and `{name}`, `{arguments}` and `{description}` are those of functions in Python's standard
library. Prompts that share a run of eight words with those of `--without` are left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from derive import runs, taken_by

GAP = re.compile(r"\{(\w+)(?::(\d+)-(\d+))?\}")
FORMS = Path(__file__).with_name("forms.json")


def described(draw: random.Random) -> list[dict[str, str]]:
    """Functions of the standard library whose docstring says in a sentence what they do."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(errors="ignore"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            if 30 < len(first) < 160 and first.endswith(".") and arguments:
                named = {"name": node.name, "arguments": ", ".join(arguments)}
                found.append({**named, "description": first})
    draw.shuffle(found)
    return found


def fill(form: str, gaps: dict[str, list[str]], given: dict[str, str], draw: random.Random) -> str:
    """The form with every gap filled; a word that is asked for again is another, people stay."""
    used: dict[str, list[str]] = {}

    def value(gap: re.Match[str]) -> str:
        name, low, high = gap.groups()
        if low:
            return str(draw.randint(int(low), int(high)))
        if name in given:
            return given[name]
        before = used.setdefault(name, [])
        if before and name in ("who", "friend", "person"):
            return before[0]
        before.append(draw.choice([word for word in gaps[name] if word not in before]))
        return before[-1]

    return GAP.sub(value, form).strip()


def prompts(draw: random.Random) -> Iterator[str]:
    """Endless; kinds in turns as often as `write` has them."""
    table = json.loads(FORMS.read_text())
    functions = described(draw)
    kinds = [kind for kind, count in table["write"].items() for _ in range(count)]
    for turn in range(2 * len(kinds)):
        kind = draw.choice(kinds)
        given = functions[turn % len(functions)]
        yield fill(draw.choice(table["kinds"][kind]), table["gaps"], given, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compose prompts of the kinds that people ask.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    draw = random.Random(options.seed)
    taken = taken_by(options.without)
    count = sum(json.loads(FORMS.read_text())["write"].values())
    kept: dict[str, None] = {}
    for prompt in prompts(draw):
        if len(kept) < count and taken.isdisjoint(runs(prompt)):
            kept[prompt] = None
    options.out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in kept))
    print(f"{len(kept)} prompts in {options.out}")


if __name__ == "__main__":
    main()
