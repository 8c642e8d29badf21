"""A server's client: how tokens are counted, what is sent, what goes wrong, on a server of the test's own."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from moejax.bench.backends.base import BackendError
from moejax.bench.backends.chunks import Chunk, Counted, count_tokens
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.openai_endpoint import OpenAIEndpoint
from moejax.bench.driver import drive
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import SamplingParams
from tests.bench.backends.fake_server import FakeServer, serving
from tests.bench.backends.peers import tokens

Opened = tuple[FakeServer, OpenAIEndpoint]


def greedy(length: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": length, "temperature": 0.0, "ignore_eos": True, **fields})


@pytest.fixture
def open_endpoint() -> Iterator[Callable[..., Opened]]:
    """Starts a server and a client of it; `options` are the client's, all else the server's."""
    with ExitStack() as stack:

        def make(options: dict[str, Any] | None = None, **fields: Any) -> Opened:
            server = stack.enter_context(serving(**fields))
            chosen = {"kind": "openai_endpoint", "url": server.url, **(options or {})}
            client = OpenAIEndpoint(
                "openai_endpoint", BackendOptions(**chosen), vocab_size=100, max_model_len=64, encode=None,
                decode=lambda ids: " ".join(map(str, ids)), checkpoint=None,
            )  # fmt: skip
            stack.callback(client.close)
            return server, client

        yield make


# --- counting -----------------------------------------------------------------------------------------------


def test_ids_and_running_usage_give_every_chunk_its_tokens() -> None:
    ids = [Chunk(1.0, "a", [5], None), Chunk(2.0, "bc", [6, 7], None), Chunk(3.0, "", None, 3, spoke=False)]
    counted = count_tokens(ids)
    assert (counted.times, counted.ids, counted.how) == ([1.0, 2.0, 2.0], [5, 6, 7], "ids")
    usage = [
        Chunk(1.0, "a", None, 2),
        Chunk(2.0, "", None, 3),
        Chunk(3.0, "b", None, 3),
        Chunk(4.0, "c", None, 5),
    ]
    assert count_tokens(usage).times == [1.0, 1.0, 2.0, 4.0, 4.0] and count_tokens(usage).how == "usage"


def test_usage_at_the_end_is_one_token_a_chunk_only_where_it_adds_up() -> None:
    def stream(count: int) -> list[Chunk]:
        end = Chunk(9.0, "", None, None, spoke=False)
        return [
            *(Chunk(float(k), "x", None, None) for k in (1, 2, 3)),
            end,
            Chunk(9.5, "", None, count, False),
        ]

    assert count_tokens(stream(3)) == Counted([1.0, 2.0, 3.0], [], "single")
    spread = count_tokens(stream(6))
    assert (spread.times, spread.how) == ([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], "spread")
    # First and last token are where they were seen whatever the number.
    for count in (2, 4, 5, 7, 100):
        times = count_tokens(stream(count)).times
        assert len(times) == count and (times[0], times[-1]) == (1.0, 3.0) and times == sorted(times)


def test_what_cannot_be_counted_is_an_error() -> None:
    with pytest.raises(RequestError, match="neither token ids nor usage"):
        count_tokens([Chunk(1.0, "a", None, None)])
    with pytest.raises(RequestError, match="counts 4 tokens and sent none"):
        count_tokens([Chunk(1.0, "", None, 4, spoke=False)])
    with pytest.raises(RequestError, match="without any token"):
        count_tokens([Chunk(1.0, "", None, None, spoke=False), Chunk(1.5, "", None, 0, spoke=False)])


# --- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "how", "known"),
    [("ids", "names its tokens", True), ("usage", "counts the tokens", True),
     ("single", "each of which", True), ("pairs", "spread evenly", False)],
)  # fmt: skip
def test_every_style_of_server_gives_one_instant_a_token(
    open_endpoint: Callable[..., Opened], style: str, how: str, known: bool
) -> None:
    _, client = open_endpoint(style=style)
    before = time.perf_counter()
    outputs = client.generate([[1, 2], [30]], [greedy(6), greedy(3)])
    for output, prompt, length in zip(outputs, ([1, 2], [30]), (6, 3), strict=True):
        instants = [before, output.metrics.arrival_time, *output.metrics.token_times, time.perf_counter()]
        assert instants == sorted(instants) and len(output.metrics.token_times) == length
        assert output.outputs[0].token_ids == (tokens(prompt, length) if style == "ids" else [])
        assert output.outputs[0].finish_reason == "length"
    assert how in client.describe()["token_instants"] and client.itl_known is known
    assert client.describe()["weights"] == "fake-moe" and client.memory() == {}


def test_what_is_sent(open_endpoint: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server, client = open_endpoint({"api_key_env": "MY_KEY", "options": {"priority": 3, "top_k": 9}})
    params = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, min_p=0.1, seed=7, ignore_eos=True)
    client.generate([[1, 2]], [params])
    (body,) = server.bodies
    expected = {
        "model": "fake-moe", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True,
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "priority": 3, "top_k": 9, "stream": True,
        "return_token_ids": True, "seed": 7,
    }  # fmt: skip
    assert {key: body.get(key) for key in expected} == expected
    assert server.keys[0] == "Bearer secret"
    server, client = open_endpoint({"prompts": "text"})
    client.generate([[1, 2]], [greedy(1)])
    assert server.bodies[0]["prompt"] == "1 2"


def test_requests_that_arrive_over_time_are_all_open_at_once(open_endpoint: Callable[..., Opened]) -> None:
    server, client = open_endpoint(step_s=0.02)
    asked = [PlannedRequest(0.01 * k, [k], 5) for k in range(6)]
    run = drive(client, asked, ThroughputWorkload().sampling)
    assert [list(item.token_ids) for item in run.served] == [tokens([k], 5) for k in range(6)]
    assert server.most_at_once > 1 and run.steps == ()
    # A server does not say when it took a request in.
    assert all(item.queue_s is None and item.record.completed for item in run.served)


def test_a_failing_request_is_one_of_the_traffic(open_endpoint: Callable[..., Opened]) -> None:
    _, client = open_endpoint(status=400)
    run = drive(client, [PlannedRequest(0.0, [1], 2)], ThroughputWorkload().sampling)
    assert run.served[0].failed and "the prompt is too long" in str(run.served[0].error)
    with pytest.raises(RequestError, match=r"backend openai_endpoint: .*the prompt is too long"):
        client.generate([[1]], [greedy(2)])


def test_aborted_requests_end(open_endpoint: Callable[..., Opened]) -> None:
    _, client = open_endpoint(step_s=0.05)
    output = client.submit([1], greedy(500))
    client.step()
    client.abort(output.request_id)
    assert output.outputs[0].finish_reason == "abort" and client.step() is False


def test_a_server_that_stops_early_is_found_out(open_endpoint: Callable[..., Opened]) -> None:
    """Shorter outputs than asked would be other lengths than the other backends'."""
    _, client = open_endpoint(stop_after=3)
    with pytest.raises(RequestError, match=r"gave 3 of 8 tokens.*workload.ignore_eos=false"):
        client.generate([[1]], [greedy(8)])
    (output,) = client.generate([[1]], [greedy(8, ignore_eos=False)])
    assert output.outputs[0].finish_reason == "stop" and len(output.metrics.token_times) == 3


def test_a_server_whose_tokens_cannot_be_counted(open_endpoint: Callable[..., Opened]) -> None:
    _, client = open_endpoint(style="silent")
    with pytest.raises(RequestError, match="neither token ids nor usage"):
        client.generate([[1]], [greedy(2)])


# --- opening ------------------------------------------------------------------------------------------------


def test_the_model_is_looked_up(open_endpoint: Callable[..., Opened]) -> None:
    two = ("fake-moe", "other-moe")
    with pytest.raises(ConfigError, match=r"backend.model is missing: .* serves fake-moe, other-moe"):
        open_endpoint(models=two)
    with pytest.raises(ConfigError, match=r"unknown model 'fake-mo'; did you mean 'fake-moe'\?"):
        open_endpoint({"model": "fake-mo"}, models=two)
    server, client = open_endpoint({"model": "other-moe"}, models=two)
    client.generate([[1]], [greedy(1)])
    assert server.bodies[0]["model"] == "other-moe"


def test_no_server_and_no_key() -> None:
    def opened(**options: Any) -> OpenAIEndpoint:
        return OpenAIEndpoint(
            "openai_endpoint", BackendOptions(kind="openai_endpoint", **options), vocab_size=9,
            max_model_len=None, encode=None, decode=None, checkpoint=None,
        )  # fmt: skip

    with pytest.raises(BackendError, match=r"no server answers at http://127.0.0.1:9/v1 .*backend.url"):
        opened(url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="the environment has no MOEJAX_NO_SUCH_KEY"):
        opened(url="http://127.0.0.1:9/v1", api_key_env="MOEJAX_NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="prompts=text needs the model's tokenizer"):
        opened(url="http://127.0.0.1:9/v1", prompts="text")
