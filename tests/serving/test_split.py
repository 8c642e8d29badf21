"""Requests split between versions: exact shares, the verdict on windows that both have, and over HTTP."""

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.serving.config import ServeSection
from moejax.serving.pool import EnginePool
from moejax.serving.pool_server import PoolServer
from moejax.serving.split import Split, judge
from tests.serving.test_pool import PROMPT, in_pool, wanted  # noqa: F401

SPLIT: dict[str, Any] = {"models": {"a": [], "b": []}, "split": {"a": 0.75, "b": 0.25}, "name": "both"}


@pytest.mark.parametrize("weights", [{"a": 0.9, "b": 0.1}, {"a": 1, "b": 2, "c": 5}, {"a": 0.0, "b": 3.0}])
def test_shares_are_exact_to_a_request_at_any_time(weights: dict[str, float]) -> None:
    split = Split(weights)
    for count in range(1, 200):
        split.next()
        for name, weight in weights.items():
            assert abs(split.given[name] - count * weight / sum(weights.values())) < 1


def version(slower: float, windows: range, seed: int) -> Any:
    """An engine whose latencies are `slower` times those that the moment gives everyone."""
    noise = np.random.default_rng(seed)

    def samples(kind: str) -> list[tuple[float, float]]:
        moment = {w: 1.0 + (w * 7 % 5) for w in windows}  # the machine, up to five times slower
        return [
            (10.0 * w + at, slower * moment[w] * 0.01 * noise.uniform(0.98, 1.02))
            for w in windows
            for at in (1.0, 4.0, 9.0)
        ]

    return SimpleNamespace(engine=SimpleNamespace(recent=SimpleNamespace(samples=samples)))


def test_the_verdict_pairs_what_met_the_same_moment() -> None:
    base = version(1.0, range(20), 0)
    told = {v.trial.metric: v for v in judge({"a": base, "b": version(1.3, range(8, 30), 1)})}
    assert list(told) == ["median_ttft_ms", "median_tpot_ms"]
    for verdict in told.values():
        assert verdict.outcome == "worse" and verdict.trial.samples == (12, 12)
        assert verdict.trial.ratio is not None and 1.25 < verdict.trial.ratio.estimate < 1.35
        assert "b is slower than a by 1." in verdict.sentence()
    assert {v.outcome for v in judge({"a": base, "b": version(1.0, range(20), 2)})} == {"no winner"}
    assert {v.outcome for v in judge({"a": base, "b": version(1.3, range(18, 30), 1)})} == {"too few"}
    assert {v.outcome for v in judge({"a": base, "b": version(1.3, range(20, 30), 1)})} == {"too few"}


def test_over_http_and_back(wanted: dict[str, list[int]], tmp_path: Any) -> None:  # noqa: F811
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    asked = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    asked |= {"return_token_ids": True, "detokenize": False}

    async def body(pool: EnginePool) -> None:
        server = PoolServer(pool, ServeSection(admin_keys_file=str(keys), **SPLIT))
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

            async def act(**given: Any) -> httpx.Response:
                head = {"Authorization": "Bearer secret"}
                return await client.post("/admin/split", json=given, headers=head)

            async def answered(**more: Any) -> str:
                told = (await client.post("/v1/completions", json=asked | more)).json()
                assert told["choices"][0]["token_ids"] == wanted[told["model"]]
                return str(told["model"])

            listed = {
                model["id"]: model["max_model_len"]
                for model in (await client.get("/v1/models")).json()["data"]
            }
            assert listed == {"a": 48, "a2": 48, "b": 48, "both": 48}
            cut = await client.post("/tokenize", json={"prompt": "x", "model": "both"})
            assert cut.status_code == 400, "there is no tokenizer, and no request is counted"
            assert (await client.post("/v1/completions", content=b"{")).status_code == 400
            assert sorted([await answered(model="both") for _ in range(4)]) == ["a", "a", "a", "b"]
            assert [await answered(model=name) for name in ("a", "b")] == ["a", "b"]
            told = (await act(model="both")).json()
            assert told["requests"] == {"a": 3, "b": 1} and told["errors"] == {"a": 0, "b": 0}
            assert [row["outcome"] for row in told["verdicts"]] == ["too few", "too few"]
            assert (await act(weights={"a": 1})).json()["weights"] == {"a": 1.0, "b": 0.0}
            assert {await answered() for _ in range(4)} == {"a"}, "rolled back"
            for weights, message in [
                ({"c": 1}, "unknown version 'c' (known: a, b)"), ({"a": 0}, "one above 0"),
                ({"a": "x"}, "at least 0"), ({"a": -1, "b": 1}, "at least 0"), ([1], "version → share"),
            ]:  # fmt: skip
                refused = await act(weights=weights)
                assert refused.status_code == 400 and message in refused.json()["error"]["message"]
            assert (await client.post("/admin/split", json={})).status_code == 401
            assert {await answered() for _ in range(2)} == {"a"}, "as it was"
            assert (await act(model="a")).status_code == 404
            assert (await client.post("/tokenize", json={"prompt": "x", "model": "c"})).status_code == 404
        server.close()

    in_pool(body)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": None}, "serve.split needs serve.name"),
        ({"name": "a"}, "serve.split needs serve.name"),
        (
            {"split": {"a": 1.0, "c": 1.0}},
            r"unknown version 'c' \(known: a, b\); its versions are of serve.models",
        ),
        ({"split": {"a": 0.0}}, "one above 0"),
        ({"models": {}}, "unknown version 'a'"),
        ({"split": {}}, "serve.models"),
    ],
)
def test_settings_that_split_nothing(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSection(**(SPLIT | changed))
