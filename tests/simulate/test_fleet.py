"""Fleets of simulated engines: nothing is lost or told twice; what pools, links and sites add to times."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from moejax.bench.backends.replica import FleetCosts, Layout
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import TrafficRun, drive
from moejax.bench.simulate.config import SimulateSection
from moejax.bench.traffic import Lengths, ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig, PrefixCacheConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.plan import Plan
from moejax.results.metrics import Slo
from moejax.simulate.fleet import Autoscale, Failure, Fleet, Link, Pools, Power, Site
from moejax.simulate.routers import DISPATCHES, SiteLoad, desired_replicas, desired_size
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import Part, StepTime
from tests.model_shapes import TWO_LAYERS

MODEL = TWO_LAYERS.replace(max_position_embeddings=2048)
ENGINE = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, block_size=16, max_model_len=1024)
STEP, ROW, PROMPT = 1e-3, 1e-4, 2e-5
SLO = Slo(ttft_ms=50, tpot_ms=5)


def step_time(plan: Plan) -> StepTime:
    seconds = max(STEP + ROW * len(part.decodes) + PROMPT * part.chunk_tokens for part in plan.groups)
    return StepTime(seconds, (Part("host", "roofline", seconds),))


def fleet_of(
    fleet: Fleet,
    blocks: int = 400,
    groups: int = 1,
    engine: EngineConfig = ENGINE,
    devices: int = 1,
    **costs: Any,
) -> SimulatedBackend:
    """Returns a fleet of one layout, or of those that autoscaling has, each with twice the devices and the
    speed of the one before; the weights of number n take 10 n ms to be read."""

    def layout(name: str, number: int) -> Layout:
        def faster(plan: Plan) -> StepTime:
            return StepTime(step_time(plan).seconds / 2**number, step_time(plan).parts)

        make = lambda: simulated_engine(engine, faster, blocks, groups=groups)  # noqa: E731
        return Layout(make, name, devices << number, 0.01 * number)

    names = fleet.autoscale.layouts or ["tp1"]
    return SimulatedBackend(
        MODEL,
        engine,
        [layout(name, number) for number, name in enumerate(names)],
        fleet=fleet,
        costs=FleetCosts(slo=SLO, **costs),
    )


def serve(backend: SimulatedBackend, **changes: Any) -> TrafficRun:
    """Serves requests, and checks that each ends once with all of its tokens and that no engine is broken."""
    given: dict[str, Any] = {"num_requests": 60, "prompt_len": 100, "output_len": 20, "request_rate": 400.0}
    workload = ThroughputWorkload(**given | changes)
    plan = plan_requests(workload, MODEL.vocab_size)
    run = drive(backend, plan, workload.sampling, workload=workload, clock=backend.clock, sleep=backend.sleep)
    assert len(run.served) == len(plan)
    for item, asked in zip(run.served, plan, strict=True):
        assert item.record.completed and item.record.output_len == asked.output_len == len(item.token_ids)
        assert item.queue_s is not None and item.queue_s >= 0, "nobody is served before it has come"
        times = item.record.metrics.token_times
        assert all(a < b for a, b in itertools.pairwise([item.record.metrics.arrival_time, *times]))
    for replica in backend.replicas:
        if replica.ended is None:
            replica.engine.scheduler.check_integrity()
            assert replica.engine.scheduler.idle and not replica.engine.scheduler.allocator.num_used
    return run


STEPS = Autoscale(
    layouts=["tp1", "tp2", "tp4"], queue_ms=2.0, interval_s=0.02, cooldown_s=0.04, cold_start_s=0.01
)
FLEETS = {
    "mixed": Fleet(replicas=3, router="two_choices"),
    "pools": Fleet(pools=Pools(2, 2)),
    "sites": Fleet(sites=[Site("a", 2, 5.0), Site("b", 1, 1.0)], dispatch="least_loaded"),
    "autoscaled": Fleet(
        autoscale=Autoscale(1, 4, queue_ms=2.0, interval_s=0.02, cooldown_s=0.04, cold_start_s=0.01)
    ),
    "resized": Fleet(autoscale=STEPS),
    "resized with surge": Fleet(replicas=2, autoscale=dataclasses.replace(STEPS, surge=True)),
    "a lost replica of a resized fleet": Fleet(replicas=2, fail=Failure(1, 0.06), autoscale=STEPS),
    "a lost replica": Fleet(replicas=2, fail=Failure(1, 0.06)),
    "a lost prefill replica": Fleet(pools=Pools(2, 1), fail=Failure(0, 0.02)),
    "a lost decode replica": Fleet(pools=Pools(1, 2), fail=Failure(2, 0.06)),
}


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize(("blocks", "groups"), [(400, 1), (24, 2)])  # plenty, and preemptions
def test_every_request_ends_once_with_all_its_tokens(name: str, blocks: int, groups: int) -> None:
    runs, rate = [], math.inf if "lost" in name else 400.0
    for _ in range(2):
        backend = fleet_of(FLEETS[name], blocks, groups, link=Link(1e-4, 1e9), block_bytes=1e5)
        runs.append(serve(backend, request_rate=rate))
    assert runs[0].rows(SLO) == runs[1].rows(SLO), "deterministic"
    row = backend.fleet_row()
    assert (row["requeued"] > 0) == ("lost" in name)
    assert (row["kv_sent_bytes"] > 0) == (backend.fleet.pools.prefill > 0)
    assert row["num_devices"] > 1
    assert ("scale_events" in row) == backend.fleet.autoscale.enabled == bool(backend.scaled)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_idle_link_takes_its_time_between_the_first_and_the_second_token(overlap: bool) -> None:
    engine = EngineConfig(**{**vars(ENGINE), "overlap": overlap})
    slow, none = Link(3e-3, 1e9), Link()
    first, second = (
        fleet_of(Fleet(pools=Pools(1, 1)), engine=engine, link=link, block_bytes=1e6) for link in (slow, none)
    )
    (one,), (other,) = (
        each.generate([[1] * 100], [SamplingParams(max_tokens=6)]) for each in (first, second)
    )
    sent = 3e-3 + 7 * 1e6 / 1e9  # 100 tokens are 7 blocks
    assert first.fleet_row()["kv_sent_bytes"] == 7e6
    assert first.fleet_row()["mean_kv_sent_ms"] == pytest.approx(1e3 * sent)
    assert other.metrics.ttft == one.metrics.ttft == pytest.approx(STEP + 100 * PROMPT)
    assert one.metrics.itl[0] - other.metrics.itl[0] == pytest.approx(sent)
    assert one.metrics.itl[1:] == pytest.approx(other.metrics.itl[1:])
    # Without it, an engine that only decodes.
    assert other.metrics.tpot == pytest.approx(STEP + ROW)
    assert second.replicas[1].runner.phase_s.keys() == {"decode"}


def test_a_sender_sends_one_after_another_and_one_token_needs_no_link() -> None:
    backend = fleet_of(Fleet(pools=Pools(1, 1)), link=Link(0.0, 1e9), block_bytes=1e6)
    outputs = backend.generate([[1] * 96, [2] * 96], [SamplingParams(max_tokens=4)] * 2)
    gaps = [output.metrics.itl[0] for output in outputs]
    assert gaps[1] - gaps[0] == pytest.approx(6e-3, abs=2 * (STEP + 2 * ROW))
    (single,) = backend.generate([[1] * 96], [SamplingParams(max_tokens=1)])
    assert single.outputs[0].finish_reason == "length" and backend.sent["times"] == 2


def test_who_finds_no_block_waits_and_is_not_computed_again() -> None:
    # Room for two sequences of 7 blocks and their outputs' further one.
    backend = fleet_of(Fleet(pools=Pools(1, 1)), blocks=17)
    run = serve(backend, num_requests=12, request_rate=math.inf, output_len=10)
    assert all(item.preemptions == 0 for item in run.served)
    assert backend.replicas[1].runner.phase_s.keys() == {"decode"}
    assert max(item.record.metrics.itl[0] for item in run.served) > 10 * STEP


def test_a_decode_replica_takes_over_what_its_prefix_cache_has_in_place() -> None:
    engine = EngineConfig(**{**vars(ENGINE), "prefix_cache": PrefixCacheConfig(enabled=True, place="device")})
    backend = fleet_of(Fleet(pools=Pools(1, 1)), engine=engine)
    params = [SamplingParams(max_tokens=6)]
    for _ in range(3):
        (output,) = backend.generate([[3] * 100], params)
        assert output.metrics.tpot == pytest.approx(STEP + ROW)
    for replica in backend.replicas:
        replica.engine.scheduler.check_integrity()
    assert backend.replicas[1].runner.phase_s.keys() == {"decode"}


@pytest.mark.parametrize("name", ["pools", "a lost replica"])
def test_static_batching(name: str) -> None:
    engine = EngineConfig(**{**vars(ENGINE), "batching": "static"})
    serve(fleet_of(FLEETS[name], engine=engine, link=Link(1e-4, 1e9), block_bytes=1e5))


def test_sites_add_their_way_there_and_back_to_the_first_token_alone() -> None:
    near, far = (fleet_of(Fleet(sites=[Site("s", 1, ms)])) for ms in (0.0, 40.0))
    (one,), (other,) = (each.generate([[1] * 50], [SamplingParams(max_tokens=5)]) for each in (near, far))
    assert other.metrics.ttft - one.metrics.ttft == pytest.approx(0.08)
    assert other.metrics.itl == pytest.approx(one.metrics.itl)


def test_dispatch_rules_and_what_sites_cost() -> None:
    sites = [SiteLoad(0.01, 2.0, 30.0), SiteLoad(0.05, 1.0, 2.0)]
    chosen = {name: rule(sites, 0.01) for name, rule in DISPATCHES.items()}
    assert chosen == {"nearest": 0, "cheapest": 1, "least_loaded": 1}
    assert DISPATCHES["least_loaded"](sites, 0.001) == 0, "latency counts"
    places = [Site("a", 1, 1.0, 2.0), Site("b", 1, 50.0, 1.0)]
    ttft = {}
    for rule in DISPATCHES:
        backend = fleet_of(Fleet(sites=places, dispatch=rule))
        run = serve(backend, request_rate=400.0)
        ttft[rule] = run.metrics(SLO)["mean_ttft_ms"] or 0.0
        row, used = backend.fleet_row(), [bool(replica.runner.phase_s) for replica in backend.replicas]
        assert used == {"nearest": [True, False], "cheapest": [False, True]}.get(rule, [True, True])
        assert row["cost_per_million_output_tokens"] == pytest.approx(
            row["device_seconds"] / 2 * 3.0 / 3600 / 1200 * 1e6
        )
    assert ttft["least_loaded"] < min(ttft["nearest"], ttft["cheapest"])


def test_desired_replicas() -> None:
    def wanted(*args: float) -> int:
        return desired_replicas(int(args[0]), *args[1:], least=1, most=8)

    assert wanted(2, 1.0, 0.9) == 2 and wanted(2, 1.4, 0.9) == 3 and wanted(2, 50.0, 0.9) == 4
    assert wanted(6, 9.0, 1.0) == 8 and wanted(0, 0.0, 0.0) == 1
    assert wanted(4, 0.4, 0.5) == 3 and wanted(4, 0.4, 0.7) == 4 and wanted(4, 0.6, 0.1) == 4
    assert wanted(1, 0.0, 0.0) == 1


@pytest.mark.parametrize(
    ("pressure", "use", "size"), [(1.1, 0.0, 8), (1.0, 0.1, 4), (0.4, 0.39, 2), (0.4, 0.4, 4), (0.6, 0.0, 4)]
)
def test_desired_size(pressure: float, use: float, size: int) -> None:
    assert desired_size(4, pressure, use, smaller=2, larger=8) == size


@pytest.mark.parametrize("goal", [{"queue_ms": 20.0}, {"attainment": 0.9}])
def test_replicas_follow_the_load_and_cost_less_than_as_many_for_good(goal: dict[str, float]) -> None:
    scale = Autoscale(1, 4, **goal, interval_s=0.1, cooldown_s=0.2, cold_start_s=0.1)
    load: dict[str, Any] = {
        "num_requests": 1200, "request_rate": 200.0, "rate_steps": (0.2, 1.8), "rate_step_s": 1.5,
    }  # fmt: skip
    kept, rows = [], []
    for fleet in (Fleet(), Fleet(replicas=4), Fleet(autoscale=scale)):
        backend = fleet_of(fleet)
        run = serve(backend, **load)
        kept.append(sum(row["slo_met"] for row in run.rows(SLO)) / len(run.served))
        rows.append(backend.fleet_row())
    assert kept[0] < kept[2] <= kept[1]
    assert rows[0]["device_seconds"] < rows[2]["device_seconds"] < rows[1]["device_seconds"]
    assert 1 < rows[2]["replicas"] <= 4
    gone = [replica for replica in backend.replicas if replica.ended is not None]
    assert gone and all(
        replica.ready_at == pytest.approx(replica.since + 0.1) for replica in backend.replicas[1:]
    )


@pytest.mark.parametrize("surge", [False, True])
def test_a_replica_ends_what_it_has_and_its_successor_s_devices_are_paid_for_from_its_start(
    surge: bool,
) -> None:
    # Five at once are over what is allowed at the first look, which is the last one that changes anything.
    goal = Autoscale(
        layouts=["tp1", "tp2"],
        queue_ms=1e-3,
        interval_s=0.005,
        cooldown_s=9.0,
        cold_start_s=0.005,
        surge=surge,
    )
    engine = EngineConfig(**{**vars(ENGINE), "max_num_seqs": 2, "overlap": False})
    backend = fleet_of(Fleet(autoscale=goal), engine=engine, devices=3)
    outputs = [backend.submit([1] * 50, SamplingParams(max_tokens=8)) for _ in range(5)]
    late = None
    while backend.step():
        if late is None and backend.scaled:
            late = backend.submit([1] * 50, SamplingParams(max_tokens=8))
    old, new = backend.replicas
    assert backend.scaled == [(0.005, "tp1", "tp2")]
    # Two pairs and a single one, each in a step with its prompts and seven without them.
    pair, single = 2 * 50 * PROMPT + STEP + 7 * (STEP + 2 * ROW), 50 * PROMPT + STEP + 7 * (STEP + ROW)
    drained = 2 * pair + single + (pair - single) * surge
    assert old.ended == pytest.approx(drained) and old.draining
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    start = 0.005 if surge else drained
    assert (new.since, new.ready_at) == pytest.approx((start, start + 0.015))
    assert late is not None and len(late.metrics.token_times) == 8
    row = backend.fleet_row()
    if surge:  # it came while the replica still served
        assert late.metrics.token_times[-1] == pytest.approx(drained) and not new.runner.phase_s
        assert (row["replicas"], row["num_devices"]) == (2, 9)
        assert row["device_seconds"] == pytest.approx(3 * drained + 6 * (drained - 0.005))
    else:
        served = drained + 0.015 + single / 2
        assert late.metrics.token_times[-1] == pytest.approx(served)
        assert late.metrics.token_times[0] == pytest.approx(drained + 0.015 + (50 * PROMPT + STEP) / 2)
        assert (row["replicas"], row["num_devices"]) == (1, 6)
        assert row["device_seconds"] == pytest.approx(3 * drained + 6 * (0.015 + single / 2))


@pytest.mark.parametrize("surge", [False, True])
def test_a_replica_grows_and_shrinks_with_the_load_one_layout_at_a_time(surge: bool) -> None:
    goal = dataclasses.replace(STEPS, surge=surge, queue_ms=20.0, interval_s=0.1, cooldown_s=0.2)
    load: dict[str, Any] = {
        "num_requests": 1200, "request_rate": 200.0, "rate_steps": (0.2, 1.8), "rate_step_s": 1.5,
    }  # fmt: skip
    small, backend = fleet_of(Fleet()), fleet_of(Fleet(autoscale=goal))
    waits = [serve(each, **load).metrics(SLO)["mean_ttft_ms"] or 0.0 for each in (small, backend)]
    assert waits[1] < waits[0]
    names, layout = goal.layouts, "tp1"
    for _, old, new in backend.scaled:
        assert old == layout and abs(names.index(new) - names.index(old)) == 1
        layout = new
    assert {new > old for _, old, new in backend.scaled} == {True, False}, "both ways"
    alive = [replica for replica in backend.replicas if replica.ended is None]
    assert [replica.layout.name for replica in alive][-1] == layout
    assert len(backend.replicas) == len(backend.scaled) + 1
    for before, after in itertools.pairwise(backend.replicas):
        assert before.ended is not None and before.successor is after.layout
        assert before.ended >= after.ready_at if surge else before.ended == after.since


def test_who_finds_nobody_is_placed_in_the_order_of_arrival_once_somebody_serves() -> None:
    goal = Autoscale(1, 2, queue_ms=2.0, interval_s=0.02, cooldown_s=0.04, cold_start_s=0.01)
    backend = fleet_of(Fleet(autoscale=goal, fail=Failure(0, 0.005)))
    run = serve(backend, num_requests=20)
    begun = [item.record.metrics.scheduled_time or 0.0 for item in run.served]
    assert begun == sorted(begun) and backend.scaled[0][1:] == (0, 1)
    assert backend.replicas[1].ready_at == pytest.approx(0.03)


def test_energy_is_of_the_given_watts() -> None:
    backend = fleet_of(Fleet(replicas=2, power=Power(100.0, 400.0, 300.0)), devices=4)
    backend.generate([[1] * 100], [SamplingParams(max_tokens=6)])
    prompt, decode = STEP + 100 * PROMPT, 5 * (STEP + ROW)
    joules = 4 * (400 * prompt + 300 * decode + 100 * (prompt + decode))
    assert backend.fleet_row()["assumed_joules_per_output_token"] == pytest.approx(joules / 6)


def test_an_aborted_request_on_its_way_ends() -> None:
    backend = fleet_of(Fleet(sites=[Site("s", 1, 40.0)]))
    output = backend.submit([1] * 10, SamplingParams(max_tokens=4))
    backend.abort(output.request_id)
    while backend.step():
        pass
    assert output.finished and not output.metrics.token_times
    with pytest.raises(RequestError, match="blocks"):
        fleet_of(Fleet(), blocks=2).submit([1] * 100, SamplingParams(max_tokens=4))


def test_wrong_fleets_are_one_line() -> None:
    for make, text in (
        (lambda: Pools(prefill=1), "simulate.pools needs prefill and decode"),
        (lambda: Fleet(pools=Pools(1, 1), autoscale=Autoscale(max=2, queue_ms=1.0)), "exclude each other"),
        (lambda: Autoscale(max=2), "one of queue_ms and attainment"),
        (lambda: Autoscale(min=3, max=2, queue_ms=1.0), "max=2 is below min=3"),
        (lambda: Autoscale(max=2, layouts=["tp1", "tp2"], queue_ms=1.0), "layouts excludes its min and max"),
        (lambda: Autoscale(min=2, layouts=["tp1", "tp2"], queue_ms=1.0), "layouts excludes its min and max"),
        (lambda: Autoscale(layouts=["tp1", "tp2"]), "one of queue_ms and attainment"),
        (lambda: Autoscale(surge=True), "surge has no meaning without"),
        (lambda: Fleet(sites=[Site("a")], autoscale=STEPS), "exclude each other"),
        (lambda: Fleet(fail=Failure(0, 1.0), autoscale=STEPS), "nobody is left"),
        (lambda: Fleet(fail=Failure(0, 1.0)), "nobody is left"),
        (lambda: Fleet(replicas=2, fail=Failure(2, 1.0)), "there are 2"),
        (lambda: Fleet(dispatch="farthest"), "simulate.dispatch"),
        (lambda: SimulateSection(replicas=0), "simulate.replicas"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_user_s_next_request_is_in_the_step_after_the_answer() -> None:
    backend = fleet_of(Fleet(), engine=EngineConfig(**{**vars(ENGINE), "overlap": False}))
    lengths = Lengths(5, 25)
    run = serve(backend, concurrency=3, request_rate=math.inf, output_len=lengths)
    # A driver counts in whole nanoseconds, which may be just behind the clock: no reason to miss a step.
    assert max(item.queue_s or 0.0 for item in run.served) < 1e-8
