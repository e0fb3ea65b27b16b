"""A real ``paceline serve`` as an operator sees it: JSON logs, keys of a file, the trace, live lanes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from test_serve import Server, eventually

QUESTION = [{"role": "user", "content": "Tom has 3 boxes with 4 pencils each. How many pencils does he have?"}]
KEY = "key-of-the-file"


class OperatedServer(Server):
    """Its log is JSON."""

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log]


def test_what_an_operator_sees(tmp_path: Path) -> None:
    keys, trace = tmp_path / "keys", tmp_path / "trace.jsonl"
    keys.write_text(f"other\n{KEY}\n", encoding="utf-8")
    options = ("--log-format", "json", "--api-key-file", str(keys), "--trace", str(trace), "--max-concurrency", "2")
    server = OperatedServer(*options, "--max-ctx", "2048", "--draft-policy", "fixed", "--threads", "1")
    root, headers = server.base.removesuffix("/v1"), {"authorization": f"Bearer {KEY}"}
    try:
        assert httpx.get(root + "/slots").status_code == 401
        props = httpx.get(root + "/props", headers=headers).json()
        assert "<|im_start|>" in props["chat_template"] and props["speculation"] is True

        prompt = httpx.post(root + "/apply-template", json={"messages": QUESTION}, headers=headers).json()["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n")
        tokens = httpx.post(root + "/tokenize", json={"content": prompt}, headers=headers).json()["tokens"]
        assert httpx.post(root + "/detokenize", json={"tokens": tokens}, headers=headers).json()["content"] == prompt

        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{root}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
            identifier = response.headers["x-request-id"]
            lines = response.iter_lines()
            assert next(lines)

            def decoding() -> dict[str, Any] | None:
                slots = httpx.get(root + "/slots", headers=headers).json()
                return next((slot for slot in slots if slot["rounds"] > 3), None)

            slot = eventually(decoding, 20)
            assert slot["state"] == "decode" and slot["prefilled"] == slot["prompt_tokens"] == len(tokens)
            assert 1 <= slot["width"] <= 8 and slot["age_seconds"] > 0
            assert 1 <= slot["acceptance_length"] == (slot["generated"] - 1) / slot["rounds"]
        assert eventually(lambda: httpx.get(root + "/slots", headers=headers).json() == [], 10)
        ended = eventually(lambda: [one for one in server.events if one["message"] == "request ended"], 10)
    finally:
        server.close()

    (started,) = [one for one in server.events if one["message"] == "request started"]
    assert started["id"] == ended[0]["id"] == identifier
    assert started["engine_ids"] == [slot["request_id"]]
    assert ended[0]["finish_reason"] == "cancelled" and ended[0]["prompt_tokens"] == len(tokens)
    assert ended[0]["decode_ms"] > 0 and ended[0]["acceptance_length"] >= 1
    assert {one["logger"] for one in server.events} >= {"paceline.engine", "paceline.server"}
    assert all(one["level"] == "info" for one in server.events if one["message"] != "answered with an error")
    assert KEY not in "".join(server.log) and "pencils" not in "".join(server.log)

    rounds = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()][1:]
    spans = [span for line in rounds for span in line["lanes"]]
    assert {span["request"] for span in spans} == set(started["engine_ids"])
    assert sum(span["keep"] for span in spans if span["kind"] == "prefill") == len(tokens)
    assert max(span["width"] for span in spans if span["kind"] == "verify") == 8
