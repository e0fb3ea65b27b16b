"""A slice of what ``python -m paceline.bench.fuzz`` does, against the demo pair; and what it would find."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench import fuzz
from paceline.bench.servers import Server, read_servers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    where = tmp_path_factory.mktemp("fuzz")
    values = {"model": "demo", "draft": "demo", "lanes": str(fuzz.LANES)}
    with Server(
        read_servers()["paceline"], (*fuzz.FLAGS, "--max-ctx", "48"), values, where / "log", where / "trace"
    ) as server:
        yield server


def test_no_request_makes_the_server_fail(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SLICE", 2)
    findings = fuzz.fuzz(server.url, 54, seed=1)
    assert not findings.failures
    assert findings.sent == 54 and len({status.rsplit(" ", 1)[0] for status in findings.statuses}) == 14
    assert server.still_held() is None and server.exit_status() is None


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        ('data: {"choices": []}\n\ndata: [DONE]\n\n', False),
        ('data: {"error": {"code": "client_too_slow", "type": "invalid_request_error"}}\n\n', False),
        ('data: {"error": {"code": "lane_failed", "type": "server_error"}}\n\n', True),
        ('event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n', True),
        ('data: {"type": "response.failed", "response": {"error": {"code": "server_error"}}}\n\n', True),
        ("", True),
    ],
)
def test_streams_that_end_with_a_fault_of_the_server_are_found(stream: str, fault: bool) -> None:
    assert (fuzz._fault_of_stream(stream) is not None) == fault
