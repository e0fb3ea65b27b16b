"""What whoever runs a server may choose about its clients."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.server.urgency import MAX_TIMEOUT

MIN_BUFFER_TOKENS = 64
"""Several bursts: what has just come waits for a moment, however fast its client reads."""

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Checked on construction; ``ConfigError`` names the option.

    With ``api_keys`` a client must send one of them. Pages of ``cors_origins`` (``*``: of any) may use the server from a
    browser. A body may have ``max_body_bytes``. A client may leave ``stream_buffer_tokens`` of a stream unread, and may for
    ``client_timeout`` seconds neither read what waits for it nor send more of a body that it has begun. ``max_queue``
    answers may wait for a lane. A request without a ``timeout`` has ``request_timeout`` seconds, None: as long as it takes.
    When the server is told to end, what runs may go on for ``drain_timeout`` seconds.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    stream_buffer_tokens: int = 8192
    client_timeout: float = 60.0
    max_queue: int = 256
    request_timeout: float | None = None
    drain_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not all(key and key == key.strip() for key in self.api_keys):
            raise ConfigError(
                "an API key (--api-key, --api-key-file, PACELINE_API_KEY) is empty or has spaces around it", param="api_key"
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin must be * or look like https://example.org:8080, got {origin!r}", param="cors_origin"
                )
        for name, least in (("max_body_bytes", 1), ("stream_buffer_tokens", MIN_BUFFER_TOKENS)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", param=name)
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, got {self.max_queue}", param="max_queue")
        if self.request_timeout is not None and not 0 < self.request_timeout <= MAX_TIMEOUT:
            raise ConfigError(
                f"request_timeout must lie in (0, {MAX_TIMEOUT:g}] seconds, got {self.request_timeout:g}",
                param="request_timeout",
            )
        if not 0 <= self.drain_timeout <= MAX_TIMEOUT:
            raise ConfigError(
                f"drain_timeout must lie in [0, {MAX_TIMEOUT:g}] seconds, got {self.drain_timeout:g}", param="drain_timeout"
            )
        if not 0.05 <= self.client_timeout <= 86_400:
            raise ConfigError(
                f"client_timeout must lie in [0.05, 86400] seconds, got {self.client_timeout:g}", param="client_timeout"
            )


def api_keys(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """The keys given and those of a file, one a line; blank lines do not count."""
    keys = list(given)
    if "" in keys:
        raise ConfigError("--api-key is empty; leave it out to serve without a key", param="api_key")
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"--api-key-file {file}: {reason}", param="api_key_file") from None
        found = [line for line in lines if line]
        if not found:
            raise ConfigError(f"--api-key-file {file} holds no key", param="api_key_file")
        keys += found
    return tuple(keys)
