"""What no client of good will sends: each body, head and connection gets a line, and the server goes on."""

import gc
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moejax import LLM
from moejax.engine import recent
from tests.engine.tiny import small_config, write_model
from tests.serving.test_server import ENGINE, error_of, served

pytestmark = pytest.mark.slow
GOOD: dict[str, Any] = {"model": "toy", "prompt": "a", "max_tokens": 2, "temperature": 0}
TYPES: list[Any] = ["x", -1, 1.5, True, [], {}, [[]], [None], {"a": 1}, 10**400, -(10**30), [[[1]]], "\ud800"]
NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "toy/../toy",
    "..\\..\\toy",
    "file:///x",
    "toy\x00",
    "a" * 9000,
    "%2e%2e",
]
FIELDS = [
    "model", "prompt", "max_tokens", "temperature", "top_p", "stop", "logprobs", "stream_options",
    "seed", "response_format", "structured_outputs", "deadline_ms", "logit_bias", "min_tokens",
]  # fmt: skip


def text(rng: random.Random, size: int) -> str:
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x80, 0xD800)))) for _ in range(size)
    )


def wrong_body(rng: random.Random) -> bytes:
    """A body that no server may take."""
    good = json.dumps(GOOD).encode()
    match rng.randrange(8):
        case 0:  # cut off
            return good[: rng.randrange(len(good))]
        case 1:  # a byte that JSON has not
            where = rng.randrange(len(good))
            return good[:where] + bytes([rng.choice((0x00, 0x01, 0x80, 0xFF))]) + good[where:]
        case 2:
            depth = rng.choice((300, 5_000, 50_000))
            return b'{"prompt": ' + b"[" * depth + b"]" * rng.choice((depth, depth - 1, 0)) + b"}"
        case 3:
            return json.dumps({**GOOD, text(rng, rng.randrange(1, 40)) + "\n": rng.choice(TYPES)}).encode()
        case 4:
            return json.dumps({**GOOD, "model": rng.choice(NAMES)}).encode()
        case 5:  # numbers
            field = rng.choice(("max_tokens", "temperature", "n", "seed", "top_k"))
            value = rng.choice(
                ("1e400", "-1e400", "9" * 5000, "NaN", "-Infinity", "1e", "--1", "0x10", "01", "-2")
            )
            return json.dumps({**GOOD, field: "@"}).replace('"@"', value).encode()
        case 6:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60)))
        case _:
            return json.dumps(
                {**GOOD, "prompt": rng.choice(([2**63], [-1], [10**30], [1.5], ["a", 1], [[]], [], {}))}
            ).encode()


def odd_body(rng: random.Random) -> bytes:
    """A body that may be good or not."""
    fields = {rng.choice(FIELDS): rng.choice(TYPES) for _ in range(rng.randrange(1, 4))}
    return json.dumps({**GOOD, **fields}).encode()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = write_model(tmp_path_factory.mktemp("fuzz"), small_config())
    with pytest.MonkeyPatch.context() as patch:  # `LLM.stats` keeps so many steps and requests
        patch.setattr(recent, "RECORDS", 64)
        opened = LLM(path, engine=ENGINE)
    with opened:
        yield opened


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with served(llm, read_timeout_s=2.0) as (found, _):
        yield found


def answers(client: httpx.Client) -> None:
    told = client.post("/v1/completions", json=GOOD)
    assert told.status_code == 200 and told.json()["usage"]["completion_tokens"] == 2


def test_ten_thousand_bodies(address: str) -> None:
    rng = random.Random(7)
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(10_000):
            wrong = rng.random() < 0.7
            body = wrong_body(rng) if wrong else odd_body(rng)
            response = client.post(rng.choice(("/v1/completions", "/v1/chat/completions")), content=body)
            assert response.status_code in ((400, 404, 413) if wrong else (200, 400, 404)), (
                body,
                response.text,
            )
            if response.status_code != 200:
                assert len(error_of(response)) < 2_000, body
            if number % 1_000 == 0:
                answers(client)
        answers(client)


def test_headers_and_connections_that_never_end(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    half = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for number, one in enumerate(half):  # a head, or a body, that does not come to its end
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            one.sendall(b"X-A: 1\r\n" if number % 2 else b"Content-Length: 9\r\n\r\n{")
        with httpx.Client(base_url=address, timeout=60) as client:
            answers(client)
            many = {f"X-{number}": "1" for number in range(500)}
            assert client.post("/v1/completions", json=GOOD, headers=many).status_code == 200
            for head in (
                b"X-Long: " + b"a" * 200_000,
                b"Content-Length: " + b"9" * 30,
                b"Content-Length: -1",
            ):
                with socket.create_connection((host, int(port))) as one:
                    one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
                    assert one.recv(100).split(b" ")[1] in (b"400", b"413"), head[:40]
            answers(client)
        assert b" 408 " in half[0].recv(1000).split(b"\r\n")[0]
    finally:
        for one in half:
            one.close()


def test_nothing_grows_with_requests(address: str, llm: LLM) -> None:
    """Objects that Python's collector knows, over thousands of requests: whole, streamed, wrong and left."""

    def ask(number: int) -> None:
        with httpx.Client(base_url=address, timeout=60) as client:
            for k in range(50):
                match (number + k) % 4:
                    case 0:
                        answers(client)
                    case 1:
                        assert client.post("/v1/completions", json={**GOOD, "stream": True}).text.endswith(
                            "[DONE]\n\n"
                        )
                    case 2:
                        assert client.post("/v1/completions", json={**GOOD, "n": -1}).status_code == 400
                    case _:
                        body = {**GOOD, "stream": True, "max_tokens": 40}
                        with client.stream("POST", "/v1/completions", json=body) as response:
                            next(response.iter_bytes())

    def objects_after(requests: int) -> int:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(requests // 50)))
        while llm.stats()["running"]:
            pass
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(2_000)
    assert objects_after(4_000) - before < 400  # a tenth of an object a request
