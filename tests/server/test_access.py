"""Keys, origins, limits on headers, ids, and what is written to the log."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import Running, bursts, eventually, running

from paceline.errors import ConfigError
from paceline.logs import _JsonFormatter, _TextFormatter
from paceline.server.http import MAX_HEADER_BYTES, MAX_HEADERS
from paceline.server.options import ServerOptions, api_keys
from paceline.types import Emission, Request, RequestStats

CHAT = "/v1/chat/completions"
SECRET = "the-prompt-is-secret"
ORIGIN = {"origin": "https://a.example"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(api_keys=("first", "sécond")) as server:
        yield server


def ask(server: Running, path: str, **headers: str) -> int:
    return httpx.get(server.url + path, headers={k.encode(): v.encode() for k, v in headers.items()}).status_code


def test_any_key_opens_by_either_header(locked: Running) -> None:
    for headers in (
        {"authorization": "Bearer first"},
        {"authorization": "bearer sécond"},
        {"x-api-key": "sécond"},
    ):
        assert ask(locked, "/v1/models", **headers) == 200
    for wrong in ({}, {"authorization": "Bearer firs"}, {"authorization": "Basic first"}, {"x-api-key": "first,sécond"}):
        assert ask(locked, "/v1/models", **wrong) == 401


@pytest.mark.parametrize("path", ["/props", "/slots", "/v1/models/x"])
def test_what_tells_about_the_server_needs_a_key(locked: Running, path: str) -> None:
    assert ask(locked, path) == 401


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", CHAT])
def test_what_costs_time_needs_a_key(locked: Running, path: str) -> None:
    assert httpx.post(locked.url + path, json={}).status_code == 401


def test_health_and_metrics_are_open(locked: Running) -> None:
    assert ask(locked, "/health") == ask(locked, "/metrics") == 200


def test_keys_of_options_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n", encoding="utf-8")
    assert api_keys(["zero"], file) == ("zero", "one", "two")
    assert api_keys([], None) == ()
    file.write_text("\n", encoding="utf-8")
    for given, path, words in (
        ([""], None, "--api-key is empty"),
        ([], file, "holds no key"),
        ([], tmp_path / "none", "No such file"),
        ([], tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            api_keys(given, path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_keys": (" x",)}, "spaces"),
        ({"cors_origins": ("a.example",)}, "https://"),
        ({"cors_origins": ("https://a.example/path",)}, "https://"),
        ({"max_body_bytes": 0}, "at least 1, got 0"),
        ({"stream_buffer_tokens": 63}, "at least 64, got 63"),
        ({"client_timeout": 0}, "got 0"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptions(**options)


def test_without_an_origin_browsers_get_no_permission(locked: Running) -> None:
    answer = httpx.get(locked.url + "/health", headers=ORIGIN)
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.options(locked.url + CHAT, headers=ORIGIN | {"access-control-request-method": "POST"}).status_code == 405


def test_an_origin_may_use_the_server_and_read_its_errors() -> None:
    with running(cors_origins=("https://a.example",), api_keys=("key",)) as server:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        asked = httpx.options(server.url + CHAT, headers=ORIGIN | wanted)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = httpx.post(server.url + CHAT, json={}, headers=ORIGIN)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(server.url + CHAT, headers={"origin": "https://b.example"} | wanted)
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "headers",
    [{"x-long": "x" * MAX_HEADER_BYTES}, {f"x-{index}": "" for index in range(MAX_HEADERS)}],
    ids=["long", "many"],
)
def test_headers_without_measure_are_a_431_with_both_numbers(locked: Running, headers: dict[str, str]) -> None:
    answer = httpx.get(locked.url + "/health", headers=headers)
    assert answer.status_code == 431
    assert str(MAX_HEADERS) in answer.json()["error"]["message"]
    assert str(MAX_HEADER_BYTES) in answer.json()["error"]["message"]


def test_a_body_of_no_type_is_refused(locked: Running) -> None:
    """A page may send one to a foreign server without asking."""
    answer = httpx.post(locked.url + CHAT, content=b"{}", headers={"x-api-key": "first"})
    assert answer.status_code == 415


def test_every_reply_has_an_id_and_takes_the_clients(locked: Running) -> None:
    made = [httpx.get(locked.url + path).headers["x-request-id"] for path in ("/health", "/v1/models")]
    assert len(set(made)) == 2
    for offered, taken in (("Trace-1.a_b", True), ("a b", False), ("x" * 65, False), ('"}\\n{', False)):
        answer = httpx.get(locked.url + "/health", headers={"x-request-id": offered})
        assert (answer.headers["x-request-id"] == offered) == taken


def counted(request: Request) -> Iterator[Emission]:
    yield Emission(request.id, (104, 105))
    stats = RequestStats(1, len(request.prompt), 6, 2, 6, 3, (2, 3), 0.25, 0.5, 0.125)
    yield Emission(request.id, (106, 107, 108), "length", stats)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.message, record.fields) for record in caplog.records if hasattr(record, "fields")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_two_lines(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    with running() as server:
        server.engine.script = counted
        body = {"prompt": SECRET, "stream": stream, "max_tokens": 5}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
    (started, start), (ended, end) = lines(caplog)
    assert (started, ended) == ("request started", "request ended")
    assert start == {
        "id": "mine",
        "endpoint": "completions",
        "prompt_tokens": len(SECRET),
        "max_tokens": 5,
        "choices": 1,
        "engine_ids": [server.engine.submitted[0].id],
    }
    assert end.pop("total_ms") >= 0
    assert end == {
        "id": "mine",
        "endpoint": "completions",
        "finish_reason": "length",
        "error": None,
        "prompt_tokens": len(SECRET),
        "completion_tokens": 6,
        "queue_ms": 250.0,
        "prefill_ms": 500.0,
        "decode_ms": 125.0,
        "rounds": 2,
        "drafted": 6,
        "accepted": 3,
        "acceptance_length": 2.5,
    }


def tireless(request: Request) -> Iterator[Emission]:
    """Until it is cancelled, which the engine says some time after the client has its answer."""
    while True:
        yield Emission(request.id, tuple(b"one STOP"))
        time.sleep(0.01)


def test_a_stop_string_and_a_failure_have_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    with running() as server:
        server.engine.script = tireless
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stop": "STOP"})
        assert eventually(lambda: len(lines(caplog)) == 2)
        server.engine.script = bursts("x", finish="error")
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        httpx.post(f"{server.url}/v1/completions", json={"prompt": SECRET, SECRET: 1})
    ends = [fields for message, fields in lines(caplog) if message == "request ended"]
    assert [(end["finish_reason"], end["error"]) for end in ends] == [("stop", None), ("error", "lane_failed")]
    refused = [fields for message, fields in lines(caplog) if message == "answered with an error"]
    assert refused == [{"status": 500, "code": "lane_failed"}, {"status": 400, "code": "unknown_parameter"}]


def test_no_line_holds_a_key_or_a_prompt(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    key = "key-is-secret"
    with running(api_keys=(key,)) as server:
        headers = {"authorization": f"Bearer {key}"}
        chat = {"messages": [{"role": "user", "content": SECRET}]}
        for body in (chat, chat | {SECRET: 1}, chat | {"stop": [SECRET], "stream": True}, {"messages": SECRET}):
            httpx.post(server.url + CHAT, json=body, headers=headers)
        httpx.post(server.url + CHAT, json=chat, headers={"authorization": "Bearer " + SECRET})
        httpx.get(f"{server.url}/{SECRET}?{SECRET}")

        def broken(messages: list[dict[str, Any]], **kwargs: Any) -> str:
            raise ValueError(f"cannot read {messages}")

        monkeypatch.setattr(server.template, "render", broken)
        assert httpx.post(server.url + CHAT, json=chat, headers=headers).status_code == 500
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    for formatter in (_TextFormatter("%(levelname)s %(message)s"), _JsonFormatter()):
        text = "\n".join(map(formatter.format, ours))
        assert SECRET not in text and key not in text
        assert "request failed" in text and "ValueError" in text and "in broken" in text


def test_headers_that_do_not_end_are_cut_off(locked: Running) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"x" * 4096)
            pytest.fail("4 MB of headers were read")


def test_json_lines_parse() -> None:
    record = logging.LogRecord("paceline.server", logging.INFO, __file__, 1, 'a "quoted"\nline', None, None)
    record.fields = {"id": "x", "none": None, "list": ["a"]}
    line = _JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed.pop("time").startswith("20")
    assert parsed == {"level": "info", "logger": "paceline.server", "message": 'a "quoted"\nline', "id": "x", "list": ["a"]}
