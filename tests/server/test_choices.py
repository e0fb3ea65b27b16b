"""n, logprobs and echo over HTTP: what of an engine's emissions reaches the client, and with which text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from scripted import END, Running, Script, bursts, running

from paceline.types import Emission, Request, TokenLogprob

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def entry(token: int) -> TokenLogprob:
    """A token's made-up logprob tells which token it is of."""
    return TokenLogprob(-float(token), ((token, -float(token)), (65, -65.0)))


def says(*texts: str | bytes, finish: str | None = "stop") -> Script:
    """As ``bursts``, with logprobs as the request asks for them."""

    def script(request: Request) -> Iterator[Emission]:
        of_prompt = tuple(map(entry, request.prompt[1:])) if request.prompt_logprobs is not None else ()
        for emission in bursts(*texts, finish=finish)(request):
            logprobs = tuple(map(entry, emission.tokens)) if request.logprobs is not None else ()
            yield replace(emission, logprobs=logprobs, prompt_logprobs=of_prompt)
            of_prompt = ()

    return script


def post(server: Running, path: str, **fields: Any) -> Any:
    body: dict[str, Any] = ({"messages": HELLO} if path == CHAT else {"prompt": "hello"}) | fields
    return httpx.post(server.url + path, json=body, timeout=10).raise_for_status().json()


def chunks(server: Running, path: str, **fields: Any) -> list[Any]:
    body: dict[str, Any] = ({"messages": HELLO} if path == CHAT else {"prompt": "hello"}) | fields | {"stream": True}
    lines = httpx.post(server.url + path, json=body, timeout=10).text.split("\n\n")
    assert lines[-2] == "data: [DONE]", lines
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_chat_logprobs_are_openais(server: Running) -> None:
    server.engine.script = says("Hi")
    (choice,) = post(server, CHAT, logprobs=True, top_logprobs=2)["choices"]
    assert choice["logprobs"]["content"][0] == {
        "token": "H",
        "logprob": -72.0,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -72.0, "bytes": [72]},
            {"token": "A", "logprob": -65.0, "bytes": [65]},
        ],
    }
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["H", "i", "<|end|>"]
    assert server.engine.submitted[-1].logprobs == 2
    assert post(server, CHAT)["choices"][0]["logprobs"] is None
    assert server.engine.submitted[-1].logprobs is None


def test_completion_logprobs_are_openais(server: Running) -> None:
    server.engine.script = says("Hé".encode()[:2], "Hé!".encode()[2:])
    (choice,) = post(server, COMPLETIONS, logprobs=1)["choices"]
    assert choice["text"] == "Hé!"
    assert choice["logprobs"]["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "!", "<|end|>"]
    assert choice["logprobs"]["token_logprobs"] == [-72.0, -195.0, -169.0, -33.0, -256.0]
    assert choice["logprobs"]["top_logprobs"][1] == {"bytes:\\xc3": -195.0, "A": -65.0}
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]


def test_streamed_logprobs_come_with_their_text(server: Running) -> None:
    """A token waits for its character, and while its text may become a stop string."""
    euro = "€".encode()
    server.engine.script = says(b"a" + euro[:2], euro[2:] + b"bE", b"N", b"c", b"EN", b"D!", finish=None)
    streamed = chunks(server, COMPLETIONS, logprobs=0, stop="END")
    seen = [(c["choices"][0]["text"], c["choices"][0]["logprobs"]) for c in streamed]
    assert [(text, logprobs and logprobs["tokens"]) for text, logprobs in seen] == [
        ("a", ["a"]),
        ("€b", ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]),
        ("ENc", ["E", "N", "c"]),
        ("", ["E", "N", "D"]),
        ("", None),
    ]
    offsets = [offset for _, logprobs in seen if logprobs for offset in logprobs["text_offset"]]
    assert offsets == [0, 1, 1, 1, 2, 3, 4, 5, 6, 6, 6]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_whole_reply_says(server: Running, path: str) -> None:
    server.engine.script = says("Grüße ", "a", b"us" + "ü".encode()[:1], finish="length")
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1, "echo": True}
    whole = post(server, path, n=2, **asked)
    parts = [c["choices"][0] for c in chunks(server, path, n=2, **asked)]
    for choice in whole["choices"]:
        of_choice = [part["logprobs"] for part in parts if part["index"] == choice["index"] and part["logprobs"]]
        for name, values in choice["logprobs"].items():
            if values is not None:
                assert [value for logprobs in of_choice for value in logprobs[name]] == values


def test_every_counted_token_has_one_entry(server: Running) -> None:
    server.engine.script = says("one STOP two")
    reply = post(server, CHAT, logprobs=True, stop=["STOP"])
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "one "
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"] == len("one STOP")


def test_choices_have_their_index_and_count_the_prompt_once(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        return bursts(f"answer {request.choice}")(request)

    server.engine.script = script
    reply = post(server, CHAT, n=3, seed=4)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["answer 0", "answer 1", "answer 2"]
    first, *others = server.engine.submitted
    assert reply["usage"]["prompt_tokens"] == len(first.prompt)
    assert reply["usage"]["completion_tokens"] == 3 * len("answer 0.")
    assert [replace(other, id=first.id, choice=0) for other in others] == [first, first]
    assert first.seed == 4 and first.group == first.id and len({request.id for request in server.engine.submitted}) == 3

    reply = post(server, COMPLETIONS, prompt=["one", "three"], n=2)
    assert [choice["text"] for choice in reply["choices"]] == ["answer 0", "answer 1"] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == len("onethree")
    texts: dict[int, str] = {}
    for chunk in chunks(server, CHAT, n=3):
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    assert texts == {0: "answer 0", 1: "answer 1", 2: "answer 2"}


def test_a_choice_that_a_stop_string_ends_leaves_the_others(server: Running) -> None:
    def script(request: Request) -> Iterator[Emission]:
        return bursts("never ends" if request.choice else "ends. here", finish=None if request.choice == 0 else "length")(
            request
        )

    server.engine.script = script
    first, second = post(server, CHAT, n=2, stop=".")["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("ends", "stop")
    assert (second["message"]["content"], second["finish_reason"]) == ("never ends", "length")
    assert server.engine.cancelled == [server.engine.submitted[0].id]


def test_echo_repeats_the_prompt_with_its_logprobs(server: Running) -> None:
    server.engine.script = says("xy")
    assert post(server, COMPLETIONS, prompt="ab", echo=True)["choices"][0]["text"] == "abxy"
    assert server.engine.submitted[-1].prompt_logprobs is None
    reply = post(server, COMPLETIONS, prompt=[list(b"ab"), [END, *"é".encode()]], echo=True, logprobs=1, n=2, stop="ab")
    assert [choice["text"] for choice in reply["choices"]] == ["abxy", "abxy", "<|end|>éxy", "<|end|>éxy"]
    first, _, third, _ = (choice["logprobs"] for choice in reply["choices"])
    assert first["tokens"] == ["a", "b", "x", "y", "<|end|>"] and first["text_offset"] == [0, 1, 2, 3, 4]
    assert first["token_logprobs"] == [None, -98.0, -120.0, -121.0, -256.0] and first["top_logprobs"][0] is None
    assert third["text_offset"] == [0, 7, 7, 8, 9, 10]
    opening, *_ = chunks(server, COMPLETIONS, prompt="ab", echo=True, logprobs=1)
    assert opening["choices"][0]["text"] == "abxy" and opening["choices"][0]["logprobs"]["tokens"] == ["a", "b", "x", "y"]


def test_echoed_logprobs_have_a_limit(server: Running) -> None:
    fields: dict[str, Any] = {"prompt": ["a" * 900] * 3, "echo": True, "n": 20}
    assert len(post(server, COMPLETIONS, **fields)["choices"]) == 60
    response = httpx.post(server.url + COMPLETIONS, json=fields | {"logprobs": 20}, timeout=10)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logprobs") and "1134000" in error["message"]


def test_the_official_client(server: Running) -> None:
    server.engine.script = says("Hi")
    messages: Any = HELLO
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        chat = client.chat.completions.create(model="x", messages=messages, n=2, logprobs=True, top_logprobs=1)
        assert [choice.index for choice in chat.choices] == [0, 1]
        logprobs = chat.choices[1].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert logprobs.content[0].top_logprobs[0].token == "H"
        streamed = client.chat.completions.create(model="x", messages=messages, logprobs=True, stream=True)
        entries = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
        assert [item.token for logprobs in entries for item in logprobs.content or ()] == ["H", "i", "<|end|>"]
        completion = client.completions.create(model="x", prompt="ab", logprobs=1, echo=True)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs == [None, -98.0, -72.0, -105.0, -256.0]


def test_token_ids_are_told_once_and_only_to_those_who_ask(server: Running) -> None:
    server.engine.script = says("Hi", b"\xc3", b"\xa9")
    for path in (CHAT, COMPLETIONS):
        whole = post(server, path, return_token_ids=True, n=2)
        asked = [request.prompt for request in server.engine.submitted[-2:]]
        assert [choice["token_ids"] for choice in whole["choices"]] == [[72, 105, 0xC3, 0xA9, END]] * 2
        place = whole if path == CHAT else whole["choices"][1]
        assert place["prompt_token_ids"] == list(asked[1])

        streamed = chunks(server, path, return_token_ids=True)
        parts = [choice for chunk in streamed for choice in chunk["choices"]]
        assert [part["token_ids"] for part in parts if "token_ids" in part] == [[72, 105], [0xC3], [0xA9], [END]]
        assert "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts) == "Hié"
        told = [place["prompt_token_ids"] for place in (*streamed, *parts) if "prompt_token_ids" in place]
        assert told == [list(asked[0])]

        plain = json.dumps([post(server, path), *chunks(server, path)])
        assert "token_ids" not in plain
