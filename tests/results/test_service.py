"""Classes and tenants of measured requests: who kept to what was asked, and how even the shares were."""

import numpy as np
import pytest

from moejax.core.scheduling import SchedulingConfig, SloClass, Tenant
from moejax.engine.requests.api import RequestMetrics, RequestOptions
from moejax.results.metrics import RequestRecord
from moejax.results.service import attained, backlogs, group_rows, overlap, service_metrics

SCHEDULING = SchedulingConfig(
    slo_classes={"fast": SloClass(ttft_ms=100, tpot_ms=10), "any": SloClass()},
    tenants={"b": Tenant(weight=2.0)},
)


def record(
    arrival: float,
    scheduled: float,
    *tokens: float,
    prompt: int = 10,
    reason: str = "length",
    **options: object,
) -> RequestRecord:
    times = RequestMetrics(arrival, list(tokens), scheduled)
    asked = RequestOptions(**options)  # type: ignore[arg-type]
    return RequestRecord("r", 0, prompt, len(tokens), times, reason, asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, True),
        ({"deadline_ms": 130}, True),
        ({"deadline_ms": 110}, False),
        ({"slo_class": "any"}, True),
        ({"slo_class": "fast"}, False),  # 20 ms a token
    ],
)
def test_who_kept_to_what_was_asked(options: dict[str, object], wanted: bool):
    assert attained(record(0.0, 0.05, 0.08, 0.10, 0.12, **options), SCHEDULING) is wanted
    assert not attained(record(0.0, 0.05, 0.08, reason="time", **options), SCHEDULING)


def test_nothing_asked_is_nothing_kept():
    assert service_metrics([record(0.0, 0.1, 0.2)], SCHEDULING) == {"slo_attainment": None}


def test_spans():
    waits = backlogs([record(a, b, b, tenant="t") for a, b in ((0, 2), (1, 3), (5, 6))])
    assert waits == {"t": [(0, 3), (5, 6)]}
    assert overlap([(0, 3), (5, 9)], [(2, 6), (8, 12)], [(0, 20)]) == [(2, 3), (5, 6), (8, 9)]


def test_service_by_hand():
    """Both wait in [0, 4]: a gets a prompt and two tokens, then b, of twice the weight, the same and one more
    token. What comes later is in no share."""
    records = [
        record(0.0, 1.0, 1.0, 2.0, tenant="a"),
        record(0.0, 4.0, 4.5, 5.0, tenant="a"),
        record(0.0, 3.0, 3.0, 3.2, 3.4, tenant="b"),
        record(0.0, 4.0, 4.6, tenant="b"),
    ]
    found = service_metrics(records, SCHEDULING)
    # To 4 s, both ends included: a 10 + 2·2 and a second prompt, b half of 10 + 3·2 and of a second prompt.
    a, b = 10 + 4 + 10, (10 + 6) / 2 + 5
    assert found["jain_index"] == pytest.approx((a + b) ** 2 / (2 * (a**2 + b**2)))
    assert found["service_gap"] == pytest.approx(max(14, a - b))


def test_equal_shares_have_an_index_of_one_and_a_flood_the_least():
    even = [record(0.0, t, t, tenant="ab"[t % 2]) for t in range(1, 21)]
    even = [*even, record(0.0, 30.0, 30.0, tenant="a"), record(0.0, 30.0, 30.0, tenant="b")]
    plain = SchedulingConfig()
    index = service_metrics(even, plain)["jain_index"]
    assert index is not None and index > 0.99
    flood = [record(0.0, t, t, tenant="a") for t in range(1, 21)] + [record(0.0, 20.0, 21.0, tenant="b")]
    found = service_metrics(flood, plain)
    assert np.isclose(found["service_gap"] or 0, 20 * 12, atol=12) and (found["jain_index"] or 1) < 0.6


def test_rows_of_groups_leave_out_a_tenant_that_is_a_class():
    records = [
        record(0.0, 0.0, 0.05, tenant=t, slo_class=c)
        for t, c in ("xf", "yf", "za")
        for c in ({"f": "fast", "a": "any"}[c],)
    ]
    assert [row["group"] for row in group_rows(records, SCHEDULING)] == [
        "class any", "class fast", "tenant x", "tenant y",
    ]  # fmt: skip
    assert [row["requests"] for row in group_rows(records, SCHEDULING)] == [1, 2, 1, 1]
    assert group_rows(records[:1], SCHEDULING) == []
