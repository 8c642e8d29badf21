"""Tenants of a server: files of keys, quotas beside a plain count, what engine and metrics get of them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.core.config import EngineConfig, SpeculationConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.core.scheduling import SchedulingConfig, Tenant
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOptions, RequestOutput
from moejax.serving.metrics import render
from moejax.serving.tenants import MOST_LABELS, QuotaExceeded, Tenants, Window
from tests.engine.tiny import PROPERTY
from tests.serving.test_metrics import samples

GOLD = '[gold]\nkeys = ["k1", "k2"]\n'


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def tenants(tmp_path: Path, text: str, clock: Clock | None = None) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return Tenants(str(path), clock or Clock())


@PROPERTY
@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 5), st.integers(0, 5)), max_size=30))
def test_no_minute_has_more_than_it_may(asked: list[tuple[float, int, int]]) -> None:
    """Amounts that fit are taken, and no others: the waiting time is the shortest after which they do."""
    window, now, had = Window(), 0.0, list[list[float]]()

    def inside(instant: float) -> float:
        return sum(amount for at, amount in had if at > instant - 60.0)

    for gap, amount, really in asked:
        now += gap
        wait = window.wait_s(amount, 7, now)
        assert (wait == 0) == (inside(now) + amount <= 7)
        if wait:
            assert inside(now + wait - 1e-6) + amount > 7 >= inside(now + wait + 1e-6) + amount
        else:
            had.append(window.add(amount, now))
            had[-1][1] = min(amount, really)


@contextlib.contextmanager
def asks(given: Tenants, name: str, requests: int = 1, tokens: int = 10, **more: Any) -> Iterator[list]:
    with given.charged(name, requests, lambda: tokens, **more) as outputs:
        yield outputs


def output(prompt: int, *made: int) -> RequestOutput:
    of = [CompletionOutput(i, "", list(range(n))) for i, n in enumerate(made)]
    return RequestOutput("0", None, list(range(prompt)), of, RequestMetrics(1.0, [1.5] * max(made)))


def test_what_is_over_a_quota_is_told_when_to_come_again(tmp_path: Path) -> None:
    clock, text = Clock(), GOLD + "requests_per_minute = 3\ntokens_per_minute = 100\nmax_requests = 2\n"
    given = tenants(tmp_path, text + '[free]\nkeys = ["k3"]\n', clock)

    def refused(quota: str, seconds: int, **more: Any) -> None:
        with pytest.raises(QuotaExceeded, match=rf"^over {quota}=\d+ of this key; .* {seconds} s$") as told:
            with asks(given, "gold", **more):
                raise AssertionError("let in")
        assert told.value.retry_s == seconds

    with asks(given, "gold", tokens=60) as outputs:
        clock.now += 5
        refused("tokens_per_minute", 55, tokens=50)
        with asks(given, "gold", tokens=30):  # of which none came
            refused("max_requests", 1)
        outputs.append(output(8, 10))
    clock.now += 5  # it was charged 60 tokens and has had 18
    with asks(given, "gold", tokens=82):
        pass
    refused("requests_per_minute", 50)
    refused("requests_per_minute", 55, requests=2)
    with asks(given, "free", requests=1000):
        clock.now += 50
    with asks(given, "gold"):
        clock.now += 60
    for most, more in (("max_requests=2", {"requests": 3}), ("tokens_per_minute=100", {"tokens": 101})):
        with pytest.raises(RequestError, match=f"over {most}") as error, asks(given, "gold", **more):
            pass
        assert not isinstance(error.value, QuotaExceeded)
    stats = given.stats["gold"]
    assert (stats.admitted, given.accounts["gold"].running) == (4, 0)
    assert stats.refused == {"tokens_per_minute": 1, "max_requests": 1, "requests_per_minute": 3}


def test_best_of_counts_as_all_that_was_drawn(tmp_path: Path) -> None:
    given = tenants(tmp_path, GOLD + "tokens_per_minute = 100\n")
    with asks(given, "gold", tokens=90, drawn=4.0) as outputs:
        outputs.append(output(10, 15))
    with asks(given, "gold", tokens=30):
        pass
    with pytest.raises(QuotaExceeded), asks(given, "gold", tokens=71):
        pass


def test_the_engine_schedules_by_the_file(tmp_path: Path) -> None:
    text = (
        GOLD + 'weight = 4\nmax_blocks = 9\nslo_class = "batch"\nrequests_per_minute = 3\nisolated = true\n'
    )
    given, known = tenants(tmp_path, text), {"other": Tenant(weight=2.0)}
    engine = given.engine(EngineConfig(policy="fair", scheduling=SchedulingConfig(tenants=known)))
    gold = engine.scheduling.tenants["gold"]
    assert (gold.weight, gold.max_blocks, gold.isolated) == (4.0, 9, True)
    assert engine.scheduling.tenants == known | {"gold": gold}
    assert given.keys == {b"k1": "gold", b"k2": "gold"}
    options = given.options("gold", RequestOptions(deadline_ms=5.0))
    assert options == RequestOptions(deadline_ms=5.0, tenant="gold", slo_class="batch")
    with pytest.raises(RequestError, match="slo_class is 'batch' for this key"):
        given.options("gold", RequestOptions(slo_class="interactive"))
    for engine, message in (
        (EngineConfig(), "weight counts under engine.policy=fair alone"),
        (
            EngineConfig(policy="fair", speculation=SpeculationConfig(method="suffix")),
            "suffix drafts from all",
        ),
        (EngineConfig(scheduling=SchedulingConfig(tenants={"gold": Tenant()})), "tenants.gold is set, too"),
        (EngineConfig(scheduling=SchedulingConfig(slo_classes={})), "unknown slo_class 'batch'"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            given.engine(engine)
        assert "[gold]" in str(error.value)


def test_a_list_of_keys_is_one_tenant_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n\n second\n")
    given = Tenants(str(path))
    assert given.keys == {b"first": "", b"second": ""} and Tenants(None).keys is None
    assert given.engine(EngineConfig()) == EngineConfig()
    assert given.options("", RequestOptions(slo_class="batch")) == RequestOptions(slo_class="batch")
    with asks(given, "", requests=10**6, tokens=10**9):
        assert b"tenant=" not in render({}, given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"\[NAME\]: keys must be a list of texts"),
        ("[gold\n", r"tenants\.toml: [A-Z].*line 1"),
        ("gold = 3\n", r"\[gold\]: it must be a table"),
        ("[gold]\nweight = 2\n", r"\[gold\]: keys must be a list of texts"),
        ("[gold]\nkeys = [3]\n", r"\[gold\]: keys"),
        ('[""]\nkeys = ["k"]\n', r"\[\]: it must be a table"),
        (GOLD + '[iron]\nkeys = ["k2"]\n', r"\[iron\]: a key of it is another tenant's"),
        (GOLD + "wieght = 2\n", r"\[gold\]: .*unknown keyword 'wieght'; did you mean 'weight'"),
        (GOLD + "tokens_per_minute = 0\n", r"\[gold\]: tenant.tokens_per_minute must be an integer"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tenants(tmp_path, text)
    assert "\n" not in str(error.value) and "k2" not in str(error.value)


def test_metrics_by_tenant_are_bounded(tmp_path: Path) -> None:
    text = "".join(f'[t{i}]\nkeys = ["k{i}"]\nmax_requests = 1\n' for i in range(MOST_LABELS + 5))
    given = tenants(tmp_path, text)
    for name in ("t0", f"t{MOST_LABELS}", f"t{MOST_LABELS + 4}"):
        with asks(given, name) as outputs:
            outputs.append(output(3, 4))
            with pytest.raises(QuotaExceeded), asks(given, name):
                pass
    told = samples(render({}, given))
    assert {dict(labels)["tenant"] for _, labels in told if "tenant" in dict(labels)} == {
        *(f"t{i}" for i in range(MOST_LABELS)), "other"
    }  # fmt: skip

    def value(name: str, **labels: str) -> float:
        return told[f"moejax:tenant_{name}", frozenset(labels.items())]

    assert value("requests_total", tenant="t0") == 1 and value("requests_total", tenant="other") == 2
    assert value("requests_refused_total", tenant="other", quota="max_requests") == 2
    assert value("tokens_total", tenant="other", kind="prompt") == 6
    assert value("tokens_total", tenant="t0", kind="generation") == 4
    assert value("time_to_first_token_seconds_count", tenant="other") == 2
    assert value("time_to_first_token_seconds_sum", tenant="t0") == pytest.approx(0.5)
