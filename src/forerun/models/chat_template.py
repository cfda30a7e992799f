"""Chat templates: messages -> the text that a model was trained on, as transformers renders it.

Templates come with the model, so they are run in jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import ModelError, PromptError


class ChatTemplate:
    """A template and the special tokens it may name (`bos_token`, `eos_token`, ...).

    Raises `ModelError` when the template is not valid jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = special_tokens
        try:
            self.template = _compile(source)
        except TemplateError as error:
            raise ModelError(
                f"the chat template of this model is broken ({error}); use raw prompts"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, up to where the assistant begins.

        Raises `PromptError` when the template refuses the messages.
        """
        try:
            return self.template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(
                f"the chat template of this model refuses the messages: {error}; each needs a "
                "'role' and a 'content', in an order that the model knows"
            ) from None


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
