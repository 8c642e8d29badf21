"""An OpenAI completions server without a model, in threads of the test: one token is (sum of the prompt + k)
mod 100. `style` says what its chunks tell of tokens."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = ["fake-moe", "other-moe"]


@dataclass
class FakeServer:
    """`style`: "ids" as vLLM under return_token_ids; "usage" with running usage; "single" one chunk a token
    and usage at the end; "pairs" two tokens a chunk and usage at the end; "silent" neither. `stop_after`:
    ends there whatever was asked. `status`: answers completions with that error. `step_s`: between chunks."""

    style: str = "ids"
    models: tuple[str, ...] = ("fake-moe",)
    stop_after: int | None = None
    status: int | None = None
    step_s: float = 0.0
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt = body["prompt"]
        start = sum(prompt) if isinstance(prompt, list) else len(prompt)
        count = min(body["max_tokens"], self.stop_after or 10**9)
        tokens = [(start + k) % 100 for k in range(count)]
        size = 2 if self.style == "pairs" else 1
        for k in range(0, count, size):
            piece = tokens[k : k + size]
            choice: dict[str, Any] = {"index": 0, "text": "".join(f" {t}" for t in piece), "logprobs": None}
            choice["finish_reason"] = None
            if self.style == "ids":
                choice["token_ids"] = piece
            if self.style == "single" and k == 1:
                choice["text"] = ""  # half a character, say
            usage = {"prompt_tokens": 1, "completion_tokens": k + len(piece), "total_tokens": 2}
            yield {"choices": [choice], "usage": usage if self.style == "usage" else None}
        reason = "stop" if self.stop_after else "length"
        yield {
            "choices": [{"index": 0, "text": "", "finish_reason": reason, "logprobs": None}],
            "usage": None,
        }
        if self.style != "silent":
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            yield {"choices": [], "usage": usage}


@contextmanager
def serving(**fields: Any) -> Iterator[FakeServer]:
    """A server that answers until the block is left."""
    server = FakeServer(**fields)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            rows = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in server.models]
            self._answer(200, {"object": "list", "data": rows})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            if server.status is not None:
                self._answer(server.status, {"error": {"message": "the prompt is too long"}})
                return
            with lock:
                server._now += 1
                server.most_at_once = max(server.most_at_once, server._now)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in server.chunks(body):
                time.sleep(server.step_s)
                event = {"id": "x", "object": "text_completion", "created": 0, "model": "fake-moe", **chunk}
                self._write(f"data: {json.dumps(event)}\n\n")
            self._write("data: [DONE]\n\n")
            with lock:
                server._now -= 1
            self.close_connection = True

        def _write(self, text: str) -> None:
            try:
                self.wfile.write(text.encode())
            except OSError:
                self.close_connection = True

        def _answer(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
