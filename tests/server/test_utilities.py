"""llama-server's routes: tokens and prompts without generating, what is served, who is running."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted import END, MAX_CTX, Running, running

from paceline.types import EngineStats, LaneStats


def post(server: Running, path: str, **body: Any) -> Any:
    return httpx.post(server.url + path, json=body).json()


def test_tokenize(server: Running) -> None:
    for name in ("content", "prompt"):
        assert post(server, "/tokenize", **{name: "hé"}) == {
            "tokens": [104, 195, 169],
            "count": 3,
            "max_model_len": MAX_CTX,
        }
    pieces = post(server, "/tokenize", content="hé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post(server, "/tokenize", content="", add_special=True)["tokens"] == []


def test_detokenize(server: Running) -> None:
    assert post(server, "/detokenize", tokens=[104, 195, 169, END]) == {"content": "hé<|end|>"}
    assert post(server, "/detokenize", tokens=[195]) == {"content": "\ufffd"}


def test_apply_template_shows_what_a_chat_would_read(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert post(server, "/apply-template", **chat) == {"prompt": "user: hello\n"}
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "x", "prompt": "x"}, "content"),
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "x", "file": "/etc/passwd"}, "file"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [END + 1]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
    ],
    ids=str,
)
def test_bad_bodies_name_the_field(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_props(server: Running) -> None:
    props = httpx.get(server.url + "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == MAX_CTX
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (props["total_slots"], props["model_alias"], props["model_path"]) == (2, "scripted", "scripted.gguf")
    assert props["chat_template"] == server.template.source
    assert props["build_info"].startswith("paceline ")


def test_slots_are_the_live_lanes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(server.url + "/slots").json() == []
    lane = LaneStats(1, "ab", "decode", 7, 7, 11, 5, 4, 12, 6, 2.5)
    monkeypatch.setattr(server.engine, "stats", lambda: EngineStats(lanes=1, running=(lane,)))
    assert httpx.get(server.url + "/slots").json() == [
        {
            "lane": 1,
            "request_id": "ab",
            "state": "decode",
            "prompt_tokens": 7,
            "prefilled": 7,
            "generated": 11,
            "width": 5,
            "rounds": 4,
            "drafted": 12,
            "accepted": 6,
            "age_seconds": 2.5,
            "acceptance_length": 2.5,
        }
    ]


def test_without_an_engine_they_are_503() -> None:
    with running(loaded=False) as server:
        assert [httpx.get(server.url + path).status_code for path in ("/props", "/slots")] == [503, 503]
        assert httpx.post(server.url + "/tokenize", json={"content": "x"}).status_code == 503
