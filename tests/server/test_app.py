from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from scripted import (
    MAX_CTX,
    ByteTokenizer,
    PlainTemplate,
    Running,
    ScriptedEngine,
    bursts,
    eventually,
    joined,
    running,
    until_cancelled,
)

from paceline.server.protocol import parse_json
from paceline.server.service import INLINE_BYTES, Backend
from paceline.types import Emission, Request

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(max_body_bytes=100_000) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Running:
    """The shared server with a fresh engine and template."""
    shared.engine, shared.template = ScriptedEngine(), PlainTemplate()
    shared.service.attach(Backend(shared.engine, ByteTokenizer(), shared.template))
    return shared


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def post(server: Running, path: str = CHAT, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = ({"messages": HELLO} if path == CHAT else {"prompt": "hello"}) | fields
    return httpx.post(server.url + path, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=10)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def assert_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert "Traceback" not in response.text


def test_a_chat_reply_has_openais_shape(server: Running) -> None:
    reply = post(server, model="whatever", max_tokens=50, temperature=0, seed=-1).json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert abs(reply.pop("created") - time.time()) < 60
    prompt_tokens = len("user: hello\n")
    assert reply == {
        "object": "chat.completion",
        "model": "scripted",
        "system_fingerprint": "fp_scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 6, "total_tokens": prompt_tokens + 6},
    }
    (request,) = server.engine.submitted
    assert joined(request.prompt) == "user: hello\n"
    assert (request.max_tokens, request.temperature, request.seed) == (50, 0, 2**64 - 1)
    assert server.engine.cancelled == []


def test_the_engine_is_asked_for_what_the_client_wants(server: Running) -> None:
    post(server, COMPLETIONS, prompt=[104, 105], top_k=5, top_p=0.5, min_p=0.1, stop_token_ids=[7])
    post(server, COMPLETIONS, ignore_eos=True)
    first, second = server.engine.submitted
    assert (first.prompt, first.top_k, first.top_p, first.min_p) == ((104, 105), 5, 0.5, 0.1)
    assert first.stop_ids == {7, 256}
    assert first.max_tokens == MAX_CTX - 2
    assert second.stop_ids == frozenset()
    assert first.seed != second.seed


def test_a_chat_stream_has_openais_shape(server: Running) -> None:
    server.engine.script = bursts("Hel", "lo")
    response = post(server, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice["delta"] for choice in deltas] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in deltas] == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_a_stream_without_usage_does_not_mention_it(server: Running) -> None:
    *chunks, _ = events(post(server, COMPLETIONS, stream=True))
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "Hello"
    assert reply.system_fingerprint == "fp_scripted"
    stream = client.chat.completions.create(
        model="x",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_the_official_client_completes_and_lists_models(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="x", prompt=["one", "two"])
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "Hello"), (1, "Hello")]
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 12)
    stream = client.completions.create(model="x", prompt="one", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "Hello"
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


def test_the_official_client_sees_typed_errors(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n must be at least 1"):
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}], n=0)
    server.engine.script = bursts("Hel", finish="error")
    with pytest.raises(openai.APIError, match="cancelled"):
        list(client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}], stream=True))


def test_choices_of_a_stream_interleave(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        return bursts(joined(request.prompt).upper())(request)

    server.engine.script = script
    *chunks, done = events(post(server, COMPLETIONS, prompt=["one", "two"], stream=True))
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ONE", 1: "TWO"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_inside_a_burst_ends_and_cancels(server: Running, stream: bool) -> None:
    server.engine.script = until_cancelled("one ST", "OP two", " three")
    options = {"include_usage": True} if stream else None
    response = post(server, stop=["STOP"], stream=stream, stream_options=options)
    if stream:
        *chunks, last, _ = events(response)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason, counted = chunks[-1]["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        counted = response.json()["usage"]["completion_tokens"]
    assert (text, reason, counted) == ("one ", "stop", len("one STOP"))
    assert server.engine.cancelled == [server.engine.submitted[0].id]


def test_half_a_stop_string_is_shown_at_the_end(server: Running) -> None:
    server.engine.script = bursts("one ST", finish="length")
    choice = post(server, stop="STOP").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ST", "length")


def test_characters_over_several_bursts_stay_whole(server: Running) -> None:
    text = "naïve 你好 🚴"
    server.engine.script = bursts(*(bytes([byte]) for byte in text.encode()))
    *chunks, _ = events(post(server, stream=True))
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(parts) == text
    assert all(len(part) <= 1 for part in parts)


def test_messages_and_tools_reach_the_template(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    post(server, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert server.template.calls == [{"messages": HELLO, "tools": [tool], "enable_thinking": False}]


def test_a_model_without_a_template_only_completes(server: Running) -> None:
    server.service.attach(Backend(server.engine, ByteTokenizer(), None))
    assert_error(post(server), 400, "chat template", COMPLETIONS)
    assert post(server, COMPLETIONS).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"stop_token_ids": [99]}, "stop_token_ids"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str, stream: bool
) -> None:
    assert_error(post(server, stream=stream, **fields), 400, param=param)
    assert server.engine.submitted == []


@pytest.mark.parametrize("size", [MAX_CTX, MAX_CTX + 1, INLINE_BYTES + 1, 2 * MAX_CTX])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: Running, size: int) -> None:
    tokens = f"{size}" if size < 2 * MAX_CTX else f"at least {(size + 1) // 2}"
    assert_error(post(server, COMPLETIONS, prompt="x" * size), 400, tokens, str(MAX_CTX), param="prompt")
    if size <= INLINE_BYTES:
        response = post(server, COMPLETIONS, prompt=[1] * size)
        assert_error(response, 400, str(size), str(MAX_CTX), param="prompt")
    assert server.engine.submitted == []


def test_the_longest_prompt_leaves_one_token(server: Running) -> None:
    assert post(server, COMPLETIONS, prompt="x" * (MAX_CTX - 1), max_tokens=50).status_code == 200
    assert server.engine.submitted[0].max_tokens == 1


def test_a_text_that_normalisation_may_shorten_is_not_refused_unread(server: Running) -> None:
    for text in ("e\u0301" * 999, "\u1fbe\u0308\u0301" * 1100):  # the latter has 2 of 7 bytes left in NFC
        assert_error(post(server, COMPLETIONS, prompt=text), 400, f"{len(text.encode())} tokens", param="prompt")


def test_a_text_that_is_too_long_even_when_normalised_is_refused_unread(server: Running) -> None:
    text = "a" + "\u0315" * 4000 + "\u0300" * 4000  # marks out of order: Python would sort them in quadratic time
    assert_error(post(server, COMPLETIONS, prompt=text), 400, "at least 2001 tokens", param="prompt")


@pytest.mark.parametrize("prompt", ["", [], [257], [-1], "\ud800"], ids=repr)
def test_prompts_without_tokens_or_with_impossible_ones_are_refused(server: Running, prompt: Any) -> None:
    assert_error(post(server, COMPLETIONS, prompt=prompt), 400, "prompt", param="prompt")


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'"x"', b'{"messages": NaN}', b"\xff\xfe"])
def test_malformed_json_is_a_400(server: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_error(httpx.post(server.url + CHAT, content=content, headers=headers), 400)


def test_another_content_type_is_a_415(server: Running) -> None:
    assert_error(httpx.post(server.url + CHAT, data={"a": "b"}), 415, "application/x-www-form-urlencoded")


def test_a_body_over_the_limit_is_a_413_with_both_numbers(server: Running) -> None:
    response = post(server, COMPLETIONS, prompt="x" * 150_000)
    assert_error(response, 413, "100000", response.request.headers["content-length"])


def test_unknown_routes_and_methods_are_errors_in_openais_shape(server: Running) -> None:
    assert_error(httpx.get(server.url + "/v2/nothing"), 404, "/v2/nothing")
    response = httpx.get(server.url + CHAT)
    assert_error(response, 405, "GET")
    assert response.headers["allow"] == "POST"


def test_an_error_may_quote_what_utf8_cannot_carry_and_is_short(server: Running) -> None:
    headers = {"content-type": "application/json"}
    body = json.dumps({"messages": HELLO, "\ud800": 1})
    assert_error(httpx.post(server.url + CHAT, content=body, headers=headers), 400, param="\\ud800")
    assert len(post(server, temperature="x" * 50_000).content) < 2000


def test_a_failed_lane_is_a_typed_error(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        yield Emission(request.id, (104,))
        yield Emission(request.id, (), "error", error="round failed: out of memory")

    server.engine.script = script
    response = post(server)
    assert_error(response, 500, "out of memory")
    assert response.json()["error"]["code"] == "lane_failed"
    streamed = events(post(server, stream=True))
    assert streamed[-1]["error"]["code"] == "lane_failed"
    assert streamed[-2]["choices"][0]["delta"] == {"content": "h"}


def test_a_dead_engine_is_a_503_for_those_who_wait_and_those_who_come(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        server.engine.dead = True
        yield Emission(request.id, (), "error", error="CUDA error")

    server.engine.script = script
    assert_error(post(server), 503, "CUDA error")
    for response in (post(server), post(server, stream=True), httpx.get(server.url + "/health")):
        assert_error(response, 503, "stopped")
        assert response.json()["error"]["code"] == "engine_dead"
    assert "paceline_engine_up 0.0" in httpx.get(server.url + "/metrics").text


def test_a_bug_is_a_500_without_a_traceback(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> str:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.template, "render", broken)
    response = post(server)
    assert_error(response, 500)
    assert "secret" not in response.text


def leave(server: Running, body: dict[str, Any], wait_for: bytes | None) -> None:
    """Send a chat request and hang up, after having received ``wait_for`` if it is given."""
    content = json.dumps({"messages": HELLO, **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        if wait_for is None:
            assert eventually(lambda: server.engine.submitted)
        else:
            received = b""
            while wait_for not in received:
                received += connection.recv(4096)


@pytest.mark.parametrize(
    ("body", "said", "wait_for"),
    [
        ({}, [], None),
        ({}, ["Hello"], None),
        ({"stream": True}, [], None),
        ({"stream": True}, [], b"assistant"),
        ({"stream": True}, ["Hello"], b"Hello"),
    ],
    ids=["waiting", "collecting", "stream-at-once", "stream-before-tokens", "stream-after-tokens"],
)
def test_a_client_that_leaves_cancels_its_request(
    server: Running, body: dict[str, Any], said: list[str], wait_for: bytes | None
) -> None:
    server.engine.script = until_cancelled(*said)
    leave(server, body, wait_for)
    assert eventually(lambda: server.engine.cancelled), "the request was not cancelled"
    assert server.engine.cancelled == [server.engine.submitted[0].id]


def test_one_failed_prompt_takes_the_others_with_it(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        return (bursts("x", finish="error") if request.prompt == (1,) else until_cancelled("y"))(request)

    server.engine.script = script
    assert_error(post(server, COMPLETIONS, prompt=[[1], [2]]), 500)
    assert server.engine.cancelled == [request.id for request in server.engine.submitted if request.prompt == (2,)]


def test_a_long_prompt_does_not_stall_the_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        max_token_bytes = 1000

        def encode(self, text: str, *, add_special: bool = False) -> list[int]:
            if len(text) > INLINE_BYTES:
                started.set()
                release.wait(10)
            return [1]

    server.service.attach(Backend(server.engine, SlowTokenizer(), server.template))
    replies: list[httpx.Response] = []
    long = threading.Thread(target=lambda: replies.append(post(server, COMPLETIONS, prompt="x" * 20_000)))
    long.start()
    assert started.wait(5)
    assert post(server).status_code == 200
    assert not replies
    release.set()
    long.join()
    assert replies[0].status_code == 200


def test_a_long_body_is_read_beside_the_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: dict[bool, str] = {}

    def read(body: bytes) -> dict[str, Any]:
        readers[len(body) > INLINE_BYTES] = threading.current_thread().name
        return parse_json(body)

    monkeypatch.setattr("paceline.server.respond.parse_json", read)
    assert post(server).status_code == 200
    assert_error(post(server, COMPLETIONS, prompt=[1] * INLINE_BYTES), 400, param="prompt")
    assert readers[True].startswith("tokenize") and not readers[False].startswith("tokenize")


def test_a_model_name_that_utf8_cannot_carry_is_escaped(server: Running) -> None:
    server.engine.info = replace(server.engine.info, model_name="caf\udce9")
    assert post(server).json()["model"] == "caf\\udce9"
    assert '"model":"caf\\\\udce9"' in post(server, stream=True).text
    assert [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["caf\\udce9"]


def test_health_and_metrics(server: Running) -> None:
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    post(server)
    assert_error(post(server, temperature=-1), 400, param="temperature")
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['paceline_http_requests_total{endpoint="/v1/chat/completions",status="200"}']) >= 1
    assert float(values['paceline_http_requests_total{endpoint="/v1/chat/completions",status="400"}']) >= 1
    assert float(values['paceline_generations_total{endpoint="chat",finish_reason="stop"}']) >= 1
    assert float(values["paceline_time_to_first_token_seconds_count"]) >= 1
    assert float(values["paceline_inter_token_latency_seconds_count"]) >= 1
    expected = {
        "paceline_engine_up": 1,
        "paceline_queue_depth": 3,
        "paceline_lanes": 2,
        "paceline_rounds_total": 7,
        "paceline_acceptance_length": 2.5,
        'paceline_drafted_tokens_total{position="1"}': 4,
        'paceline_accepted_tokens_total{position="1"}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected


def test_while_loading_everything_is_a_503() -> None:
    with running(loaded=False) as server:
        for path in ("/health", "/v1/models"):
            assert_error(httpx.get(server.url + path), 503, "loading")
        assert_error(post(server), 503, "loading")
        assert "paceline_engine_up 0.0" in httpx.get(server.url + "/metrics").text
        server.service.attach(Backend(server.engine, ByteTokenizer(), server.template))
        assert post(server).status_code == 200


def ask(server: Running, authorization: str | None) -> httpx.Response:
    headers = {} if authorization is None else {b"authorization": authorization.encode()}
    return httpx.get(server.url + "/v1/models", headers=headers)


def test_with_a_key_v1_needs_it_and_the_rest_does_not() -> None:
    with running(api_keys=("other", "sésame")) as server:
        for value in (None, "Bearer wrong", "Basic sésame"):
            response = ask(server, value)
            assert_error(response, 401, "API key")
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert ask(server, "Bearer sésame").status_code == 200
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/metrics").status_code == 200
