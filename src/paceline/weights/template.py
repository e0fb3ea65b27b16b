"""The chat template of a checkpoint: Jinja, sandboxed, with the helpers that Hugging Face templates rely on.

A template is code from a model's file, and what a request sends is what it works on. So it is held to a time and a size: it
counts down in every turn of a loop and in every call, and its text and the products it makes on the way are measured.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidRequest, LoadError

MAX_SECONDS = 5.0
"""Of computing by the thread that renders. A conversation of 100,000 messages takes 0.4."""
MAX_CHARACTERS = 64 * 2**20

_CHECK = "paceline_check"
"""The name under which a template reaches the check of its time."""


class ChatTemplate:
    """A compiled template. ``origin`` names its file in the ``LoadError`` of a template that cannot be read."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", origin: str = "chat template") -> None:
        self.source = source
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.filters.update({name: _with_checked_numbers(one) for name, one in environment.filters.items()})
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
        ``enable_thinking``. ``InvalidRequest`` when the template rejects the messages, fails on them, or exceeds
        its limits."""
        variables = {
            **self._tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            _CHECK: _deadline(MAX_SECONDS),
        }
        try:
            return "".join(_measured(self._template.generate(variables)))
        except Exception as error:  # a template may fail in any way on messages it does not expect
            raise InvalidRequest(f"the chat template rejects the messages: {error}", param="messages") from error


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put a check at the head of every loop's body."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            check = nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check, lineno=loop.lineno).set_environment(self))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Check the time and the numbers before everything that is called. (The names keep out of the way of keyword
        arguments.)"""
        __context.resolve(_CHECK)()
        _check_numbers(*args, *kwargs.values())
        method = getattr(__obj, "__wrapped__", __obj)
        if getattr(method, "__name__", "") in ("format", "format_map"):
            _check_numbers(*map(int, _widths(method.__self__)))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse what makes much of little: long repetitions, huge powers, wide formats."""
        _check_numbers(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """How large a product becomes at least, in characters, items or digits; 0 where it cannot become large."""
    if operator == "*" and isinstance(left, int):
        left, right = right, left
    if operator == "*" and isinstance(right, int) and isinstance(left, (str, list, tuple)):
        return len(left) * right
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return abs(left).bit_length() * right
    if operator == "%" and isinstance(left, str):
        return max(map(int, _widths(left)), default=0)
    return 0


def _widths(form: object) -> list[str]:
    """Everything in a format that may be a width."""
    return re.findall(r"\d+", form) if isinstance(form, str) else []


def _check_numbers(*numbers: Any) -> None:
    """Refuse numbers with which a single operation would make more than a template may."""
    for number in numbers:
        if isinstance(number, int) and number > MAX_CHARACTERS:
            raise OverflowError(f"a number of more than {MAX_CHARACTERS} in an operation")


def _with_checked_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


def _deadline(seconds: float) -> Callable[[], None]:
    """A check that raises when this thread has computed for so long. Every 64th looks at the clock, which costs more than
    all else that a check does."""
    end = time.thread_time() + seconds
    turn = 0

    def check() -> None:
        nonlocal turn
        turn += 1
        if turn % 64 == 0 and time.thread_time() > end:
            raise TimeoutError(f"it takes longer than {seconds:g} s")

    return check


def _measured(pieces: Iterable[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise OverflowError(f"its text has more than {MAX_CHARACTERS} characters")
        yield piece


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which the model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
