"""Options that several commands share. Without a value, the default of `SamplingParams` applies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from forerun.core import SamplingParams
    from forerun.models.target import TargetInfo

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DRAFT = "suffix"
STDOUT = Path("-")


def option(help: str, *names: str, metavar: str | None = None) -> Any:
    """An option of typer: what it does first, since that is what reads well in a list."""
    return typer.Option(*names, help=help, metavar=metavar)


Model = Annotated[
    str, option("A folder, a .gguf file, a Hub id, or a name of 'forerun models list'.", "--model")
]
Draft = Annotated[
    str | None,
    option(
        "Who guesses ahead: none, ngram, suffix, corpus:FILE, model:ID, skip:N, medusa:DIR, "
        "eagle:DIR, eagle3:DIR, dflash:DIR; for some models drafts come with forerun, which "
        "'forerun models list' names; options as ngram:max=4,k=8; "
        f"a+b makes one tree of both, auto one of all that are at hand. [default: {DEFAULT_DRAFT}]",
        metavar="SPEC",
    ),
]
SpeculativeConfig = Annotated[
    str | None, option("The same as vLLM's JSON object, instead of --draft.", metavar="JSON")
]
Verifier = Annotated[
    str, option("Rule that accepts drafted tokens: follow, rejection, typical (lossy), reference.")
]
Static = Annotated[
    bool,
    option(
        "Check all that the draft proposes, as in papers, even where less would be faster.",
        "--static",
    ),
]
Dtype = Annotated[str, option("auto, bfloat16, float16 or float32.")]
Device = Annotated[str, option("auto, cpu, cuda, ...")]
Raw = Annotated[bool, option("Give the model the bare text, without its chat template.", "--raw")]
MaxTokens = Annotated[int, option("Longest answer, in tokens.")]
Temperature = Annotated[float, option("0 takes the likeliest token; above, tokens are sampled.")]
TopP = Annotated[float | None, option("Sample from the likeliest tokens that sum up to this.")]
TopK = Annotated[int | None, option("Sample from this many tokens; 0: from all.")]
MinP = Annotated[float | None, option("Drop tokens below this share of the likeliest one.")]
Seed = Annotated[int | None, option("Same seed, same text, with any draft.")]
IgnoreEos = Annotated[bool, option("Go on after the end of the answer.", "--ignore-eos")]
KvTokens = Annotated[
    int | None, option("Size of the key/value store, in tokens of all sequences together.")
]


def draft_spec(draft: str | None, speculative_config: str | None) -> str:
    """The spec that was given in one of two ways, or the default."""
    from forerun.drafters.spec import parse

    if draft is not None and speculative_config is not None:
        raise ConfigError("--draft and --speculative-config both name a draft; give one of them")
    if speculative_config is not None and not speculative_config.lstrip().startswith("{"):
        raise ConfigError(
            f"--speculative-config '{speculative_config}' is no JSON object; "
            "write it with braces, or use --draft"
        )
    given = draft if draft is not None else speculative_config
    spec = DEFAULT_DRAFT if given is None else given
    parse(spec)  # a spec that cannot be read is refused before torch is imported
    return spec


def check_draft(spec: str, model: str) -> None:
    """Refuse unknown drafters and options, and drafts that are not there or do not fit, before the
    model is loaded; this imports torch."""
    from forerun.drafters import check

    for drafter, its_options in check(spec, model):
        drafter.look(its_options, lambda: _known(model))


def _known(model: str) -> TargetInfo | None:
    """What the files of a model say; None where loading it will say what is wrong with them."""
    from forerun.models.describe import target_info

    try:
        return target_info(model)
    except ModelError:
        return None


def sampling(**values: Any) -> SamplingParams:
    """The parameters that were given on the command line; None stands for the default."""
    from forerun.core import SamplingParams

    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def logit_bias(entries: list[str]) -> dict[int, float]:
    """`["42=-5", "7=1.5"]` as a table. Raises `ConfigError` for anything else."""
    try:
        pairs = [entry.split("=", 1) for entry in entries]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise ConfigError(
            f"--logit-bias {' '.join(entries)}: write TOKEN_ID=BIAS, as 42=-5"
        ) from None


def sizes(name: str, text: str) -> list[int]:
    """`1,8` as numbers, each once. Raises `ConfigError` that speaks of the option `name`."""
    try:
        return list(dict.fromkeys(int(size) for size in text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} {text}: write numbers with commas, as 1,8") from None


def check_files(*files: Path | None) -> None:
    """Find out before a long run, rather than after it, that its results cannot be written."""
    for file in files:
        if file is None or file == STDOUT:
            continue
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file in it")
        if not file.absolute().parent.is_dir():
            raise ConfigError(
                f"there is no folder {file.absolute().parent} for {file.name}; make it"
            )
        is_new = not file.exists()
        if not is_new and not file.is_file():
            continue  # who reads a pipe would take a trial for the end
        try:
            file.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"cannot write {file} ({error.strerror}); choose another file"
            ) from None
        if is_new:
            file.unlink()
