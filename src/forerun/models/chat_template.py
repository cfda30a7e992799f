"""Chat templates: messages -> the text that a model was trained on, as transformers renders it.

Templates come with the model, so they are run in jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import ModelError, PromptError
from forerun.models.foreign import reason


class ChatTemplate:
    """A template and the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens

    @cached_property
    def template(self) -> Template:
        """Compiled at first use: raw prompts need none, so a broken one may not be in their way."""
        try:
            return _compile(self.source)
        except TemplateError as error:
            raise ModelError(
                f"the chat template of this model is broken ({reason(error)}); use raw prompts"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], asks: bool = True) -> str:
        """The conversation as text. `asks`: up to where the assistant begins its next turn.

        Raises `PromptError` when the template refuses the messages, `ModelError` when it is not
        valid jinja.
        """
        template = self.template
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=asks,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except Exception as error:  # a template can raise whatever Python can
            raise PromptError(
                f"the chat template of this model refuses the messages: {reason(error)}; each "
                "needs a 'role' and a 'content', in an order that the model knows"
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
