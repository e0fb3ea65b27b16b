"""Run the server: listen, load the engine, serve until a signal or the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from paceline.errors import ConfigError, EngineDead, PacelineError
from paceline.server.app import create_app
from paceline.server.connection import Connection
from paceline.server.http import MAX_HEADER_BYTES
from paceline.server.options import ServerOptions
from paceline.server.replies import printable
from paceline.server.service import Backend, Service

SEND_BUFFER_BYTES = 32 * 1024

logger = logging.getLogger("paceline.server")


def serve(
    load: Callable[[], Backend],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: ServerOptions | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until SIGINT or SIGTERM (returns 0), or until loading fails or the engine dies (returns 1). A
    ``ConfigError`` of ``load`` is raised: the caller knows what its user calls the options.

    The port is bound first, so that a port in use costs no loading, and /health answers 503 while ``load`` runs in a
    thread of its own. ``say`` prints the one line that says where the server listens; faults go to stderr, a line each.
    """
    options = options or ServerOptions()
    try:
        listener = listen(host, port, options.client_timeout)
    except (OSError, OverflowError, UnicodeError) as error:  # no such port, no such name
        return _fail(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}")
    service = Service(options)
    server = _Server(service)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def load_engine() -> None:
        backend = _load(load, server)
        if backend is None:
            return
        if server.should_exit:
            backend.handle.close()
        else:
            service.attach(backend)
            info = backend.handle.info
            say(f"Serving {printable(info.model_name)} on {address}/v1 (fingerprint {info.fingerprint})")

    with _quiet_signals(server):
        loading = threading.Thread(target=load_engine, name="load", daemon=True)
        loading.start()
        server.run(sockets=[listener])
        # Python ends daemon threads where they are, and in a native library that can abort the process.
        loading.join(options.drain_timeout)
    if service.backend is not None:
        service.backend.handle.close()
    if isinstance(server.fault, ConfigError):
        raise server.fault
    return _fail(server.fault) if server.fault else 0


class _Server(uvicorn.Server):
    """uvicorn, which stops by itself when ``fault`` is set or the engine dies, and does not wait for long answers."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            create_app(service),
            http=Connection,
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=int(service.options.drain_timeout) + 5,
        )
        super().__init__(config)
        self.fault: str | ConfigError | None = None
        self._service = service

    def stop(self, fault: str | ConfigError) -> None:
        """Stop with a fault, unless it is stopping already. May be called from any thread."""
        if not self.should_exit:
            self.fault = fault
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        backend = self._service.backend
        if backend is not None and not backend.handle.alive():
            self.stop("the engine has stopped")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = 0.0 if self.fault else self._service.options.drain_timeout
        error = EngineDead(str(self.fault or "the server is shutting down"))
        asyncio.get_running_loop().call_later(grace, self._service.abort_all, error)
        await super().shutdown(sockets)


def _load(load: Callable[[], Backend], server: _Server) -> Backend | None:
    try:
        return load()
    except ConfigError as error:
        server.stop(error)
    except (PacelineError, OSError, MemoryError) as error:
        server.stop(f"cannot load: {error}")
    except Exception as error:
        logger.exception("loading failed")
        server.stop(f"cannot load: {type(error).__name__}: {error}")
    return None


def listen(host: str, port: int, client_timeout: float) -> socket.socket:
    """A socket that listens. A connection whose client takes nothing for twice ``client_timeout`` seconds is closed."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit both. What a client does not read is to wait in the server, which counts it, and not in
        # megabytes of the kernel's.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * client_timeout))
        # Not through getaddrinfo, which takes a port modulo 65536.
        listener.bind((address[0], port, *address[2:]))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _quiet_signals(server: uvicorn.Server) -> Iterator[None]:
    """uvicorn raises the signal it stopped for once more when it has stopped. That must not kill us before we clean up."""

    def handle(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
