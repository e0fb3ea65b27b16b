"""A scripted engine and a byte tokenizer: the server's tests run against these, so that they need no model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from paceline.errors import EngineDead, InvalidRequest
from paceline.server.app import create_app
from paceline.server.options import ServerOptions
from paceline.server.run import listen
from paceline.server.service import Backend, Service
from paceline.types import Emission, EngineInfo, EngineStats, Request

END = 256
MAX_CTX = 1000

Script = Callable[[Request], Iterator[Emission]]


def bursts(*texts: str | bytes, finish: str | None = "stop") -> Script:
    """A script that says each text in one burst, a token per byte, and then ends."""

    def script(request: Request) -> Iterator[Emission]:
        for text in texts:
            yield Emission(request.id, tuple(text.encode() if isinstance(text, str) else text))
        if finish == "stop":
            yield Emission(request.id, (END,), "stop")
        elif finish is not None:
            yield Emission(request.id, (), finish)  # type: ignore[arg-type]

    return script


def until_cancelled(*texts: str) -> Script:
    """A script that says these texts and then neither speaks nor ends."""
    return bursts(*texts, finish=None)


class ScriptedEngine:
    """An ``EngineHandle`` whose requests follow ``script``, each in a thread of its own."""

    def __init__(self, script: Script | None = None) -> None:
        self.info = EngineInfo(
            model_name="scripted",
            target_path="scripted.gguf",
            drafter_path=None,
            fingerprint="fp_scripted",
            arithmetic="none",
            max_ctx=MAX_CTX,
            max_concurrency=2,
            kv_pool_tokens=2 * MAX_CTX,
            vocab_size=257,
            eos_ids=(END,),
            block_size=8,
            speculation=True,
        )
        self.script = script or bursts("Hello")
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.dead = False
        self.closed = False

    def submit(self, request: Request, sink: Callable[[Emission], None]) -> None:
        if self.dead:
            raise EngineDead("the engine has stopped")
        if request.stop_ids & {99}:
            raise InvalidRequest("stop id 99 can never fit", param="stop_token_ids")
        self.submitted.append(request)
        script = self.script

        def speak() -> None:
            for emission in script(request):
                if request.id in self.cancelled:
                    sink(Emission(request.id, (), "cancelled"))
                    return
                sink(emission)

        threading.Thread(target=speak, daemon=True).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            queued=3, lanes=2, rounds=7, verify_spans=4, emitted_in_verify=10, drafted=(4, 4), accepted=(3, 1)
        )

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.closed = True


class ByteTokenizer:
    """A token per byte, and one end token."""

    max_token_bytes = 2
    vocab_size = 257
    special_ids = frozenset({END})

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"<|end|>" if token_id == END else bytes([token_id])


class PlainTemplate:
    """One line per message; what the template was given is kept for the tests to look at."""

    source = "{% for message in messages %}… {{ tools }} <tool_call> …"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        self.calls.append({"messages": messages, "tools": tools, **kwargs})
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class Running:
    """A server on a free port, its engine and its template."""

    def __init__(self, url: str, engine: ScriptedEngine, template: PlainTemplate, service: Service) -> None:
        self.url = url
        self.engine = engine
        self.template = template
        self.service = service


@contextlib.contextmanager
def running(*, loaded: bool = True, **options: Any) -> Iterator[Running]:
    """Run an app with uvicorn in a thread. ``options`` are those of ``ServerOptions``."""
    engine, template, service = ScriptedEngine(), PlainTemplate(), Service(ServerOptions(**options))
    if loaded:
        service.attach(Backend(engine, ByteTokenizer(), template))
    listener = listen("127.0.0.1", 0, service.options.client_timeout)
    config = uvicorn.Config(create_app(service), lifespan="off", log_level="critical", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, template, service)
    finally:
        server.should_exit = True
        thread.join()


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether the condition comes true within a time that only a failing test waits for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def joined(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()
