"""The intruder's benchmark where there is nothing to measure."""

from __future__ import annotations

import socket
import sys

import pytest

from paceline.bench import intrusion
from paceline.bench.script import run
from paceline.errors import EngineDead


def test_a_server_that_does_not_answer_is_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(EngineDead, match=f"^the server at {url} does not answer as it should: ConnectError: [^\\n]+$"):
            intrusion.measure(url, 1, 0.1)


def test_a_bad_option_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["intrusion", "--phases", "0"])
    with pytest.raises(SystemExit, match="^error: --phases must be at least 1, got 0$"):
        run(intrusion.main)
