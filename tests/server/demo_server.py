"""The demo pair behind a server, for tests of whole flows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from scripted import Running, running

from paceline.config import EngineOptions
from paceline.engine.build import resolve_paths
from paceline.engine.engine import Engine
from paceline.engine.plan import Round, RoundResult
from paceline.server.service import Backend
from paceline.weights.load import open_target

Said = TypeVar("Said")


def at_once(*asks: Callable[[], Said]) -> list[Said]:
    """The answers to requests that are sent together, so that they share their rounds."""
    with ThreadPoolExecutor(len(asks)) as clients:
        return list(clients.map(lambda ask: ask(), asks))


@contextlib.contextmanager
def demo_server(
    observe: Callable[[Round, RoundResult], None] | None = None, limits: dict[str, Any] | None = None, **changes: Any
) -> Iterator[Running]:
    """Its engine is not scripted: the backend's handle is the real one. ``observe`` is told of every round, ``limits`` are
    options of the server and ``changes`` of the engine."""
    given: dict[str, Any] = {"max_ctx": 1024, "max_concurrency": 3, "draft_policy": "fixed"}
    options = EngineOptions(**given | changes)
    target = open_target(resolve_paths(options)[0])
    template = target.chat_template()
    assert template is not None
    engine = Engine(options, observe=observe)
    try:
        with running(**limits or {}) as server:
            server.service.attach(Backend(engine, target.tokenizer(), template))
            yield server
    finally:
        engine.close()
