"""The settings of a training run, in and out of TOML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forerun.config import Settings, nearest
from forerun.errors import ConfigError

UNITS = {"s": 1, "m": 60, "h": 3600}


class Recipe(Settings):
    """Everything that a run follows from, besides the model and the data.

    kind: of draft. budget_seconds: wall time, trials of the draft included; tokens: to train on.
    One of them is given. batch: texts in a step, over all processes together.
    max_length: tokens of a text. held_out: share of the prompts that is not trained on.
    draft_vocab: tokens that the draft may propose.
    start: an earlier draft to begin with, whose tokens are kept and filled up to draft_vocab; None:
    the target's own layers.
    warmup: share of the steps; decay: share at the end over which wsd sinks, cosine sinks from the
    warm-up on; both to final_lr of lr.
    cache: keep hidden states in files while the run lasts, instead of computing them each time.
    shard: with several processes, split the parameters over them (FSDP).
    trials: how many times the draft is tried out in the engine (0: never), on trial_prompts prompts
    with answers of trial_tokens.
    options: those of the kind.
    """

    title = "recipe"

    kind: str
    seed: int = 0
    budget_seconds: Annotated[float, Field(gt=0)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1)] = 6
    max_length: Annotated[int, Field(ge=8)] = 512
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    draft_vocab: Annotated[int, Field(ge=1)] | Literal["all"] = 8192
    start: str | None = None
    lr: Annotated[float, Field(gt=0)] = 1e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.03
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 0.5
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    shard: bool = False
    cache: bool = False
    trials: Annotated[int, Field(ge=0)] = 4
    trial_prompts: Annotated[int, Field(ge=1)] = 8
    trial_tokens: Annotated[int, Field(ge=2)] = 64
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_budget(self) -> Recipe:
        if (self.budget_seconds is None) == (self.tokens is None):
            raise ValueError("give either a budget of time or a number of tokens")
        return self

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step (0, 1, ...)."""
        warm = self.warm(steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        begin = warm if self.schedule == "cosine" else max(warm, steps - round(self.decay * steps))
        done = max(0.0, (step - begin) / max(1, steps - begin))
        share = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (self.final_lr + (1 - self.final_lr) * share)

    def warm(self, steps: int) -> int:
        """Steps over which the rate rises."""
        return math.ceil(self.warmup * steps)

    def toml(self) -> str:
        """The recipe as a file that can be given again."""
        values = self.model_dump(mode="json", exclude_none=True)
        options = values.pop("options")
        lines = [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines += ["", "[options]"]
        lines += [
            f"{name} = {_toml_value(value)}" for name, value in options.items() if value is not None
        ]
        return "\n".join(lines) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """What a recipe file says. Raises `ConfigError` where it cannot be read."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}; correct it") from None
    return found


def make_recipe(
    kind: str,
    defaults: Mapping[str, Any],
    options: type[Settings],
    file: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Recipe:
    """Defaults of the kind, then a file, then what was given on the command line.

    options: what the kind can be told. Raises `ConfigError` for what it cannot.
    """
    if file.get("kind", kind) != kind:
        raise ConfigError(f"the recipe is for {file['kind']}, not {kind}; name that kind")
    budget = {"budget_seconds", "tokens"}
    if budget & given.keys():
        file = {name: value for name, value in file.items() if name not in budget}
    values = {**defaults, **file, **given, "kind": kind}
    if not budget & values.keys():
        values["budget_seconds"] = 600.0
    chosen = values.get("options", {})
    if not isinstance(chosen, Mapping):
        raise ConfigError("options is a table of a recipe; write [options] above its lines")
    checked = options(**chosen)
    return Recipe(**{**values, "options": checked.model_dump(mode="json")})


def seconds(text: str) -> float:
    """`90s`, `10m` or `1.5h` as seconds. Raises `ConfigError` for anything else."""
    match = re.fullmatch(r"([\d.]+)([smh])", text.strip())
    try:
        if match and (found := float(match[1]) * UNITS[match[2]]) > 0:
            return found
    except ValueError:
        pass
    raise ConfigError(f"--budget {text}: write a time, as 90s, 10m or 1h")


def find(kind: str, known: Mapping[str, Any]) -> Any:
    """The entry of a kind. Raises `ConfigError` naming what there is."""
    if kind not in known:
        raise ConfigError(f"nothing called '{kind}' can be trained; {nearest(kind, known)}")
    return known[kind]


def _toml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # for what recipes hold, TOML writes it alike
