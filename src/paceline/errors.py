"""Typed errors. Whatever a client or a file can cause is one of these; an ``assert`` means that our own code is wrong."""

from __future__ import annotations

from collections.abc import Mapping


class PacelineError(Exception):
    """Base of all errors that a user may see.

    ``status`` is the HTTP status the server answers with, ``kind`` the ``type`` of OpenAI's error object, ``code`` its
    ``code``, ``param`` the request field at fault (if any), and ``headers`` what the answer's headers say of it.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(PacelineError):
    """A request that is wrong in itself: a bad value, an unsupported field, a prompt that does not fit."""

    status = 400
    kind = "invalid_request_error"


class AuthenticationError(PacelineError):
    """A missing or wrong API key."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class ClientTooSlow(PacelineError):
    """A client that stopped sending its request or reading its answer. Both numbers are named: what it did and the limit."""

    status = 408
    kind = "invalid_request_error"
    code = "client_too_slow"
    headers = {"connection": "close"}


class LoadError(PacelineError):
    """A model file that is missing, damaged, of another kind, or that does not fit its partner. Names the file."""


class ConfigError(PacelineError):
    """An engine option with a value that cannot work. Names the option and both numbers."""


class EngineDead(PacelineError):
    """The engine has stopped; nothing more is served by it."""

    status = 503
    code = "engine_dead"


class LaneFailed(PacelineError):
    """One request failed inside the engine; its neighbours went on."""

    code = "lane_failed"


class QueueFull(PacelineError):
    """As many requests run and wait as may; in ``retry_after`` seconds it is worth another try."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}


class DeadlineExceeded(PacelineError):
    """The request was not answered in the time that it was given."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"
    headers = {"x-should-retry": "false"}
    """OpenAI's clients would ask again; but nobody waits any more for the answer."""
