"""What several modules use. Fixtures import what only they need: most tests start without a server or a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Read when torch is loaded, here and in the processes that tests start. Threads that spin while they wait for one another
# take the cores from those that are waited for, where there are more threads than cores or other tests beside.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if TYPE_CHECKING:
    import openai
    from scripted import Running

    from paceline.bench.law import Workbench
    from paceline.structure import Compiler
    from paceline.weights.tokenizer import Tokenizer


LONGEST = ("test_law", "test_goldens", "test_faults", "test_loop", "test_commands", "test_serve", "test_lanes", "test_run")
"""Modules of half a minute and more. A module is one worker's: begun late, one of them would be waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread in the tests and in the processes that they start. Results do not depend on it (tests of that set their
    own), and threads of several processes that wait for one another on a busy machine take minutes for little arithmetic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo pair's."""
    from paceline.config import DEMO_TARGET
    from paceline.weights.load import open_target

    return open_target(DEMO_TARGET).tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    from paceline.structure import Compiler

    return Compiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.fixture(scope="session")
def bench() -> Workbench:
    """The demo pair, loaded once. Cases set the number of threads; ``one_thread`` sets it back."""
    from paceline.bench.law import Workbench

    return Workbench()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with a scripted engine."""
    from scripted import running

    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with _openai(server) as client:
        yield client


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """A server with the demo pair. Whoever gives it another template gives its own back."""
    from demo_server import demo_server

    with demo_server() as server:
        yield server


@pytest.fixture(scope="session")
def demo_client(demo: Running) -> Iterator[openai.OpenAI]:
    with _openai(demo) as client:
        yield client


def _openai(server: Running) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
