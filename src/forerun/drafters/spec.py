"""Draft specs: which drafters to use, as one line.

    none                        no drafter
    NAME                        ngram, suffix, ...
    NAME:OPTION=VALUE,...       ngram:max=4,k=8
    NAME:ARGUMENT,...           model:ID,k=4 and skip:2: one option stands first, without its name
    SPEC+SPEC                   one tree of what both believe
    auto                        all that are at hand for the model, in one tree

The first colon ends the name; later ones belong to the argument, and so do slashes. `,`, `+` and
`=` always separate: an id or path that contains one of them is given in the other form, the JSON
object that vLLM reads as `--speculative-config`:

    {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 8}
    {"method": "suffix", "suffix_decoding_max_tree_depth": 16}
    {"method": "draft_model", "model": "ID", "num_speculative_tokens": 4}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.config import nearest
from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter, unchecked: its name, what stood behind the colon without a name, the options."""

    name: str
    argument: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


AUTO = "auto"  # stands for several drafters; which ones, the model says

# vLLM's methods and their keys: the drafter and its options that mean the same.
VLLM_METHODS: dict[str, tuple[str, dict[str, str]]] = {
    "ngram": (
        "ngram",
        {
            "num_speculative_tokens": "k",
            "prompt_lookup_max": "max",
            "prompt_lookup_min": "min",
        },
    ),
    "suffix": (
        "suffix",
        {
            "num_speculative_tokens": "k",
            "suffix_decoding_max_tree_depth": "order",
            "suffix_decoding_max_cached_requests": "shared",
            "suffix_decoding_min_token_prob": "min_prob",
        },
    ),
    "draft_model": ("model", {"model": "model", "num_speculative_tokens": "k"}),
    "medusa": ("medusa", {"model": "model", "num_speculative_tokens": "k"}),
    "eagle": ("eagle", {"model": "model", "num_speculative_tokens": "k"}),
    "eagle3": ("eagle3", {"model": "model", "num_speculative_tokens": "k"}),
    "dflash": ("dflash", {"model": "model", "num_speculative_tokens": "k"}),
}


def parse(spec: str) -> list[DrafterSpec]:
    """The drafters that `spec` names, in order; none for `none`.

    Raises `ConfigError` for what cannot be read, and for methods and keys of the JSON form that
    have no counterpart here. Names and options are checked where the drafters are made.
    """
    text = spec.strip()
    if text == "none":
        return []
    if text.startswith("{"):
        return [_from_json(text)]
    parts = [part.strip() for part in text.split("+")]
    if "none" in parts:
        raise ConfigError(f"draft spec '{spec}': none stands alone; take it out")
    return [_from_text(part, spec) for part in parts]


def _from_text(text: str, spec: str) -> DrafterSpec:
    name, _, rest = text.partition(":")
    if not name:
        raise ConfigError(f"draft spec '{spec}' lacks a drafter; write for example ngram:k=8")
    argument, options = None, {}
    for index, item in enumerate(rest.split(",") if rest else ()):
        key, equals, value = (part.strip() for part in item.partition("="))
        if index == 0 and not equals:
            argument = key
        elif not (key and equals and value):
            raise ConfigError(f"'{item}' in draft spec '{spec}' is no option; write NAME=VALUE")
        elif key in options:
            raise ConfigError(f"draft spec '{spec}' sets {key} twice; remove one")
        else:
            options[key] = value
    if name == AUTO and rest:
        raise ConfigError(
            f"draft spec '{spec}': auto has no options; to set those of a drafter, name it"
        )
    return DrafterSpec(name, argument, options)


def _from_json(text: str) -> DrafterSpec:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the draft spec is no valid JSON ({error}); check its quotes") from None
    method = given.pop("method", "draft_model" if "model" in given else None)
    if method is None:
        raise ConfigError(f"the draft spec names no method; add one of: {', '.join(VLLM_METHODS)}")
    if str(method) not in VLLM_METHODS:
        raise ConfigError(f"no draft method '{method}'; {nearest(str(method), VLLM_METHODS)}")
    name, keys = VLLM_METHODS[method]
    for key in given:
        if key not in keys:
            raise ConfigError(f"draft method '{method}' has no '{key}'; {nearest(key, keys)}")
    return DrafterSpec(name, options={keys[key]: value for key, value in given.items()})
