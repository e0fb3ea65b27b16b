"""A stand-in for an OpenAI-compatible server: the same answer for the same request, and faults on demand.

``--fault KIND --at N`` lets the N-th measured request (from 0, of all that are not a warm-up) go wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_EVENT = 3
FAULTS = (
    "none",
    "status",
    "cut",
    "count",
    "die",
    "event",
    "unreadable",
    "reason",
    "usage",
    "different",
    "ids",
    "hang",
)


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, fault: str, at: int, drafts: bool, ids: bool) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.fault, self.at, self.drafts, self.ids = fault, at, drafts, ids
        self._count = -1
        self._lock = threading.Lock()

    def next_fault(self, body: dict[str, Any]) -> str:
        """What befalls this request."""
        if "Warm-up" in json.dumps(body):
            return "none"
        with self._lock:
            self._count += 1
            return self.fault if self._count == self.at else "none"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fault = self.server.next_fault(body)
        if fault == "die":
            os._exit(9)
        if fault == "status":
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "out of memory"}}')
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if fault == "hang":
            time.sleep(60)
        self._answer(body, fault)

    def _answer(self, body: dict[str, Any], fault: str) -> None:
        said = body["messages"] if "messages" in body else body["prompt"]
        digest = hashlib.sha256(json.dumps([said, fault == "different"]).encode()).digest()
        natural = 4 + digest[0] % 12
        tokens = body["max_tokens"] if body.get("ignore_eos") else min(natural, body["max_tokens"])
        ended = "length" if tokens == body["max_tokens"] else "stop"
        if "messages" in body:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for first in range(0, tokens, TOKENS_PER_EVENT):
            ids = [digest[token % 32] for token in range(first, min(first + TOKENS_PER_EVENT, tokens))]
            # the last character is no end of a line in an event stream, whatever Python's splitlines says
            text = "".join(chr(97 + token % 26) for token in ids) + "\u2028"
            piece: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
            if self.server.ids:
                piece["token_ids"] = ids[:-1] if fault == "ids" else ids
            time.sleep(0.001)
            self._event({"choices": [piece | {"finish_reason": None}], "system_fingerprint": "stand-in-1"})
            if fault == "cut":
                self.wfile.flush()
                self.connection.close()
                return
            if fault == "event":
                self._event({"error": {"message": "lane failed"}})
                return
            if fault == "unreadable":
                self.wfile.write(b"data: {half\n\n")
                return
        reason = "content_filter" if fault == "reason" else ended
        rest: dict[str, Any] = {"delta": {}} if "messages" in body else {"text": ""}
        self._event({"choices": [rest | {"finish_reason": reason}]})
        usage = {"prompt_tokens": len(said), "completion_tokens": tokens + 80 * (fault == "count")}
        last: dict[str, Any] = {"choices": []} | ({} if fault == "usage" else {"usage": usage})
        if self.server.drafts:
            last["timings"] = {"draft_n": tokens, "draft_n_accepted": tokens // 2}
        self._event(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--at", type=int, default=2)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--ids", action="store_true")
    arguments = parser.parse_args()
    StandIn(arguments.port, arguments.fault, arguments.at, arguments.drafts, arguments.ids).serve_forever()


if __name__ == "__main__":
    main()
