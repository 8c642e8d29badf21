"""`/metrics` of engines: names, types, counts beside the outputs, the dashboard's and the page's names."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from moejax.engine.llm import LLM
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.serving import metrics as metrics_module
from moejax.serving.metrics import METRICS, render
from moejax.serving.tenants import Stats
from moejax.tracking.probes import RaplProbe, Sample
from tests.engine.tiny import PROPERTY, small_config
from tests.serving.stub import request, serve, stub

ROOT = Path(__file__).parents[2]
SERVED = Stats(2, Counter(max_requests=3), Counter(prompt=4))
ENDS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def samples(text: bytes) -> dict[tuple[str, frozenset], float]:
    """Every sample by its name and labels."""
    found = [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(text: bytes | dict, name: str, **labels: str) -> float:
    found = text if isinstance(text, dict) else samples(text)
    return found[f"moejax:{name}", frozenset({"model_name": "m", **labels}.items())]


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.booleans()), min_size=1, max_size=5))
def test_each_request_is_counted_once(asked) -> None:
    llm, states = stub(), []
    for length, count, given_up in asked:
        states.append(request(llm, list(range(length)), count))
        llm.engine.add(states[-1:])
        llm.engine.step()
        llm.engine.recent.histograms()
        if given_up:
            llm.engine.abort(states[-1])
    serve(llm)
    text, outputs = samples(render({"m": llm})), [state.output for state in states]
    begun = [out.metrics for out in outputs if out.metrics.token_times]
    assert value(text, "time_to_first_token_seconds_count") == len(begun)
    assert value(text, "e2e_request_latency_seconds_count") == len(begun)
    assert value(text, "e2e_request_latency_seconds_sum") == pytest.approx(sum(t.e2e for t in begun))
    assert value(text, "inter_token_latency_seconds_count") == sum(len(t.itl) for t in begun)
    for reason, count in Counter(out.outputs[0].finish_reason for out in outputs).items():
        assert value(text, "request_success_total", finished_reason=str(reason)) == count
    assert value(text, "generation_tokens_total") == sum(len(out.outputs[0].token_ids) for out in outputs)
    assert value(text, "num_requests_running") == value(text, "num_requests_waiting") == 0


def tracked() -> SimpleNamespace:
    """An engine with all that can be told."""
    llm = stub()
    llm.engine.tiers = SimpleNamespace(hits=3, misses=1, stats=dict)
    llm.runner.routing.window = LoadWindow(2, 4, 8)
    llm.runner.routing.window.add(np.array([[4, 2, 1, 1], [0, 0, 0, 0]], np.int32))
    llm.engine.add([request(llm, [*range(12)], 4), request(llm, [*range(12)], 4)])
    serve(llm)
    llm.engine.add([request(llm, [*range(12)], 4)])
    serve(llm)
    return llm


@pytest.fixture
def _energy(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimpleNamespace(read=lambda: Sample({}, {"gpu0_energy_j": 5.0, "cpu_energy_j": None}))
    monkeypatch.setattr(metrics_module, "device_probes", lambda: (probe,))


@pytest.mark.usefixtures("_energy")
def test_every_metric_is_there_with_its_type_and_labels() -> None:
    # An AsyncLLM has an engine, too.
    text = render({"m": SimpleNamespace(llm=tracked())}, SimpleNamespace(stats={"gold": SERVED}))
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families.keys() == {f"moejax:{name}" for name in METRICS}
    for name, (kind, labels, means) in METRICS.items():
        family = families[f"moejax:{name}"]
        assert (family.type, family.documentation) == (kind, means)
        whole = name == "energy_joules" or name.startswith("tenant_")
        wanted = {*labels.split(",")} - {""} | (set() if whole else {"model_name"})
        assert {frozenset(s.labels) - {"le"} for s in family.samples} == {frozenset(wanted)}
    assert value(text, "routing_skew", layer="0") == 2.0
    assert value(text, "expert_load", layer="0", expert="1") == 0.25
    assert value(text, "prefix_cache_hits_total", tier="device") > 0
    assert samples(text)["moejax:energy_joules_total", frozenset({("device", "gpu0")})] == 5.0
    below = value(text, "time_to_first_token_seconds_bucket", le="+Inf")
    assert below == value(text, "time_to_first_token_seconds_count") == 3


def test_two_models_stay_apart_and_a_closed_one_is_left_out() -> None:
    closed = LLM(small_config(), load_format="dummy")
    closed.close()
    text = render({"a": tracked(), "b": stub(), "c": closed})
    assert {dict(labels).get("model_name") for _, labels in samples(text)} - {None} == {"a", "b"}


def test_a_scrape_needs_no_lock_of_the_engine() -> None:
    llm = stub()
    llm.engine.lock = None  # nothing can take it
    assert value(render({"m": llm}), "engine_steps_total") == 0


@pytest.mark.usefixtures("_energy")
def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "moejax.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    served = SimpleNamespace(stats={"gold": SERVED})
    there = {name for name, _ in samples(render({"m": tracked()}, served))}
    asked = [name for expr in targets for name in re.findall(r"moejax:\w+", expr)]
    assert len(targets) > 12 and all(re.search(r"moejax:\w+", expr) for expr in targets)
    assert sorted({*asked} - there) == []
    assert {name for name in there if "tenant" in name and "bucket" not in name} - {*asked} == {
        f"moejax:tenant_time_to_first_token_seconds_{end}" for end in ("sum", "count")
    }
    query = board["templating"]["list"][-1]["query"]
    assert set(re.findall(r"moejax:\w+", str(query))) <= there


def test_the_page_has_every_metric() -> None:
    rows = {
        f"| `moejax:{name}{'_total' if kind == 'counter' else ''}` | {kind} | {labels or '–'} | {means} |"
        for name, (kind, labels, means) in METRICS.items()
    }
    page = (ROOT / "docs" / "serving_metrics.md").read_text()
    assert rows == {line for line in page.splitlines() if line.startswith("| `moejax:")}


def test_a_package_that_wraps_around_goes_on_growing(tmp_path: Path) -> None:
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "900"), ("max_energy_range_uj", "1000")):
        (folder / name).write_text(text)
    probe = RaplProbe(tmp_path)
    first = probe.read().counters["cpu_energy_j"]
    (folder / "energy_uj").write_text("100")
    second = probe.read().counters["cpu_energy_j"]
    assert first is not None and second is not None and second > first
