"""What becomes of a value that the library refuses: it speaks of keywords, whoever typed a command of options.

The library's errors name the keyword at fault (``max_ctx``). Here it becomes the option (``--max-ctx``); and if the option
was typed, the error is one of the command line, with the same exit status as an option that does not exist.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

from paceline.errors import ConfigError, InvalidRequest, PacelineError

_CALLED = {
    "target": ("model", "target"),
    "drafter": ("draft",),
    "max_concurrency": ("max_concurrency", "lanes"),
    "prompts": (),  # a prompt is data: no value of an option is wrong if it does not fit
}
"""Keywords that the command line calls otherwise."""


class Command(TyperCommand):
    """A command of ours, whose errors name what was typed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            error.message = self._translated(error.message)
            named = self._parameters(error.param) if isinstance(error, (ConfigError, InvalidRequest)) else []
            typed = [parameter for parameter in named if ctx.get_parameter_source(parameter.name).name != "DEFAULT"]
            if not typed:
                raise
            raise typer.BadParameter(_beginning_with(_shown(typed[0]), error), ctx=ctx) from None

    def _translated(self, message: str) -> str:
        """With options for keywords of several words. One word, such as ``device``, may be a word of the sentence."""

        def option(found: re.Match[str]) -> str:
            parameters = self._parameters(found[0])
            return _shown(parameters[0]) if parameters else found[0]

        return re.sub(r"(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/.=])", option, message)

    def _parameters(self, keyword: str | None) -> list[Any]:
        if keyword is None:
            return []
        names = _CALLED.get(keyword, (keyword,))
        return [
            parameter
            for name in names
            for parameter in self.params
            if name == parameter.name or f"--{name.replace('_', '-')}" in parameter.opts
        ]


def _shown(parameter: Any) -> str:
    """The longest spelling of an option, or how the help calls an argument."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name)
    return str(max(parameter.opts, key=len))


def _beginning_with(option: str, error: PacelineError) -> str:
    """The message. Its first word becomes the option if it is the keyword; the option goes in front if it is missing."""
    message = re.sub(rf"^{error.param}(?!\w)", option, error.message)
    return message if option in message else f"{option}: {message}"
