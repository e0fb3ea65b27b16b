"""Logging: one event a line on stderr, as text or as a JSON object. The server's and the engine's process log alike.

What clients send never gets into a line: keys and prompts are not logged, and of an exception on the server's side only the
places and the types are, because its message may quote a request.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The HTTP request that is being handled; every line logged meanwhile carries it as ``id``."""

_CLIENT_SIDE = ("paceline.server", "uvicorn")
"""Loggers of code that holds what clients sent."""
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_logging(level: int, form: LogFormat = "text") -> None:
    """Log to stderr from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter(_TEXT_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


def event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """Log an event with fields at level INFO. A field that is None is left out."""
    logger.info(message, extra={"fields": fields})


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = (f" {name}={_bare(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(fields)

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = _exception(record)
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        exception = _exception(record)
        if exception:
            line["exception"] = exception
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {"id": request_id.get()} | getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _bare(value: object) -> str:
    """A value without quotes where it is one word."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    return text if text.isprintable() and text and " " not in text else json.dumps(text)


def _exception(record: logging.LogRecord) -> str | None:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    if record.name.startswith(_CLIENT_SIDE):
        return "\n".join(map(_places, _chain(error)))
    return "".join(traceback.format_exception(error)).rstrip()


def _places(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """What was raised, and what that was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
