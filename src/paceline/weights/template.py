"""The chat template of a checkpoint: Jinja, sandboxed, with the helpers that Hugging Face templates rely on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidRequest, LoadError


class ChatTemplate:
    """A compiled template. ``origin`` names its file in the ``LoadError`` of a template that cannot be read."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", origin: str = "chat template") -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise LoadError(f"{origin}: the chat template cannot be read{where}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. ``kwargs`` are further variables of the template, such as
        ``enable_thinking``. ``InvalidRequest`` when the template rejects the messages or fails on them."""
        variables = {
            **self._tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template may fail in any way on messages it does not expect
            raise InvalidRequest(f"the chat template rejects the messages: {error}", param="messages") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which the model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
