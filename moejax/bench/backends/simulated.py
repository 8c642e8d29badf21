"""Replicas of a simulated engine behind the members of `Backend`, on one virtual clock.

Each replica has the real loop and scheduler and a clock of its own. What happens next is the earliest of: an
event (a request reaches a replica, or its keys and values do), or a step of the replica that is furthest
behind; a failure and looks at the load come before what is later than they. `moejax.bench.driver.drive` with
`clock` and `sleep` of this backend serves a workload as it does in real time, in as much time as the host's
work takes.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.replica import FleetCosts, FleetRequest, Layout, Replica
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import RequestError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.requests.api import RequestMetrics, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.scheduling.sequence import Sequence as Sample
from moejax.engine.stats import StepRecord
from moejax.results.metrics import RequestRecord
from moejax.simulate.fleet import Fleet
from moejax.simulate.routers import DISPATCHES, ROUTERS, Router, SiteLoad, desired_replicas, desired_size


class SimulatedBackend(Backend):
    """Simulated replicas of one model.

    Args:
        layouts: what replicas can be of, from few devices to many.
        start: the number of the first ones' layout.
        fleet: how many there are and who gets what.
        costs: what it is of.

    Attributes:
        scaled: the instant of each change by autoscaling, with the number of replicas, or a replica's layout,
            before and after.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        layouts: Sequence[Layout],
        *,
        start: int = 0,
        fleet: Fleet | None = None,
        costs: FleetCosts | None = None,
    ) -> None:
        self.name, self.model, self.config, self.layouts = "simulated", model, config, layouts
        self.vocab_size, self.encode, self.checkpoint, self.seed = model.vocab_size, None, None, None
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        self.max_num_seqs, self.batching = config.max_num_seqs, config.batching
        self.fleet, self.costs = fleet or Fleet(), costs or FleetCosts()
        self.sent: defaultdict[str, float] = defaultdict(float)  # between pools: times, bytes, seconds
        self.now = 0.0
        self._on_step: Callable[[StepRecord], None] | None = None
        self._routers: defaultdict[tuple[str, int], Router] = defaultdict(ROUTERS[self.fleet.router])
        self._ids, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._sent: dict[str, FleetRequest] = {}
        self._at_site: Counter[int] = Counter()
        self._ended: list[RequestOutput] = []  # since the last look
        self._completed = self._tokens = self._requeued = 0
        self._fails = math.inf if self.fleet.fail.at_s is None else self.fleet.fail.at_s
        self._looks = self.fleet.autoscale.interval_s if self.fleet.autoscale.enabled else math.inf
        self._changed = -math.inf
        self._parked: list[Callable[[float], None]] = []  # until a replica is started
        self.scaled: list[tuple[float, int | str, int | str]] = []
        self.replicas: list[Replica] = []
        for part, site in self.fleet.places:
            self.replicas.append(Replica(*layouts[start].make(), layouts[start], part, site))

    def _start(self, layout: Layout, now: float) -> None:
        """Starts a replica, which serves once its weights are read."""
        ready = now + layout.load_s + self.fleet.autoscale.cold_start_s
        self.replicas.append(Replica(*layout.make(), layout, since=now, ready_at=ready))
        self.replicas[-1].engine.on_step = self._on_step
        for place in self._parked:
            self._at(ready, place)
        self._parked.clear()

    # -- time ----------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Returns the instant up to which all has happened."""
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> bool:
        """Lets happen what comes next; False if nothing is to."""
        busy = [replica for replica in self.replicas if replica.busy]
        first = min(busy, key=lambda replica: replica.clock.now, default=None)
        event = self._events[0][0] if self._events else math.inf
        then = min(event, math.inf if first is None else first.clock.now)
        if then == math.inf and not self._parked:
            return False
        if then >= min(self._fails, self._looks):
            self._control()
        elif event <= then:
            heapq.heappop(self._events)[2](event)
            self.now = max(self.now, event)
        elif first is not None:
            first.engine.step()
            if first.runner.error is not None:
                raise first.runner.error
            if first.draining and not first.busy:
                self._end(first, first.clock.now)
            busy = [replica for replica in busy if replica is not first or first.busy]
            behind = min((replica.clock.now for replica in busy), default=first.clock.now)
            self.now = max(self.now, min(behind, self._events[0][0] if self._events else math.inf))
        return True

    def _at(self, instant: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (instant, next(self._order), event))

    # -- requests ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        # A driver's whole nanoseconds can be behind the clock: the request would come a step late.
        arrival = self.now if arrival_time is None else min(arrival_time, self.now)
        if not prompt or len(prompt) + params.max_tokens > (self.max_model_len or 0):
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {params.max_tokens} to generate are over the limit of "
                f"{self.max_model_len} (engine.max_model_len)"
            )
        number = next(self._ids)
        processor = OutputProcessor(0, params, None)
        output = RequestOutput(str(number), None, prompt, [processor.output], RequestMetrics(arrival))
        sample = Sample(list(prompt), len(prompt), params, len(prompt) + params.max_tokens, number)
        sample.options, sample.arrival, sample.identity = options or RequestOptions(), arrival, ()
        self.replicas[0].engine.scheduler.check_fits(sample)
        site = self._site()
        away = self.fleet.sites[site].latency_ms / 1e3 if self.fleet.sites else 0.0
        request = FleetRequest(output, processor, sample, site, away)
        self._sent[output.request_id] = request
        self._at_site[site] += 1
        request.on_close, request.on_part = lambda: self._close(request), self._hand_over
        self._at(arrival + self.costs.request_s + away, partial(self._begin, request))
        return output

    def _site(self) -> int:
        """Returns the number of the site that the next request goes to."""
        if not self.fleet.sites:
            return 0
        loads = [
            SiteLoad(site.latency_ms / 1e3, site.price_per_hour, self._at_site[number] / site.replicas)
            for number, site in enumerate(self.fleet.sites)
        ]
        busy_s = sum(sum(replica.runner.phase_s.values()) for replica in self.replicas)
        return DISPATCHES[self.fleet.dispatch](loads, busy_s / max(1, self._completed))

    def _close(self, request: FleetRequest) -> None:
        del self._sent[request.output.request_id]
        self._at_site[request.site] -= 1
        self._completed += 1
        self._tokens += len(request.output.outputs[0].token_ids)
        if self.fleet.autoscale.enabled:
            self._ended.append(request.output)

    def _begin(self, request: FleetRequest, now: float) -> None:
        """Has a request's tokens computed from the first on."""
        alone = self.fleet.pools.prefill > 0
        self._place(request, request.renew(alone=alone), "prefill" if alone else "both", now)

    def _place(self, request: FleetRequest, sample: Sample, part: str, now: float) -> None:
        """Queues a sequence with one of the replicas of its part and site, or waits for one to be ready."""
        if request.finished:
            return
        there = [r for r in self.replicas if r.ended is None and not r.draining]
        there = [r for r in there if (r.part, r.site) == (part, request.site)]
        serving = [replica for replica in there if replica.ready_at <= now]
        if not serving:
            again = partial(self._place, request, sample, part)
            if there:
                self._at(min(replica.ready_at for replica in there), again)
            else:
                self._parked.append(again)
            return
        router = self._routers[part, request.site]
        replica = serving[router.choose([each.load() for each in serving], sample.tokens)]
        if not replica.busy:
            replica.clock.now = max(replica.clock.now, now)
        request.replica = replica
        try:
            replica.engine.add([request])
        except RequestError as error:
            request.output.error = str(error)
            request.abort("error")

    def _hand_over(self, request: FleetRequest, now: float) -> None:
        """Sends the keys and values of what a prefill replica has computed, one request's after another's."""
        sender, costs = request.replica, self.costs
        assert sender is not None
        known = request.sequences[0].computed
        size = sender.engine.scheduler.allocator.block_size
        sent = math.ceil(known / size) * costs.block_bytes
        start = max(now, sender.link_free)
        sender.link_free = start + sent / costs.link.bandwidth
        there = sender.link_free + costs.link.latency_s
        for name, amount in (("times", 1), ("bytes", sent * costs.senders), ("seconds", there - start)):
            self.sent[name] += amount
        request.replica = None
        self._at(there, partial(self._place, request, request.renew(known), "decode"))

    def abort(self, request_id: str) -> None:
        if (request := self._sent.get(request_id)) is None:
            return
        if request.replica is None:  # on its way
            request.abort()
        else:
            request.replica.engine.abort(request)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        outputs = [self.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while self.step():
            pass
        return outputs

    # -- control -------------------------------------------------------------------------------------------

    def _control(self) -> None:
        """Has a replica fail, or looks at the load, whichever comes first."""
        if self._fails <= self._looks:
            now, self._fails = self._fails, math.inf
            self._fail(self.fleet.fail.replica, now)
        else:
            now, self._looks = self._looks, self._looks + self.fleet.autoscale.interval_s
            self._scale(now)
        self.now = max(self.now, now)

    def _fail(self, number: int, now: float) -> None:
        """Takes a replica away; what it had not ended is computed elsewhere, from its prompt on. A step that
        it has begun still ends."""
        replica = self.replicas[number] if number < len(self.replicas) else None
        if replica is None or replica.ended is not None:
            return
        self._end(replica, max(now, replica.clock.now) if replica.busy else now)
        for request in list(self._sent.values()):
            if request.replica is replica:
                request.replica = None
                self._requeued += 1
                self._at(replica.ended or now, partial(self._begin, request))

    def _drain(self, replica: Replica, now: float) -> None:
        replica.draining = True
        if not replica.busy:
            self._end(replica, now)

    def _end(self, replica: Replica, instant: float) -> None:
        replica.ended = instant
        if replica.successor is not None and not self.fleet.autoscale.surge:
            self._start(replica.successor, instant)

    def _scale(self, now: float) -> None:
        """Starts replicas or has one drain, by what was seen since the last look."""
        goal, last = self.fleet.autoscale, now - self.fleet.autoscale.interval_s
        live = [r for r in self.replicas if r.ended is None and not r.draining]
        serving = [replica for replica in live if replica.ready_at <= now]
        ended, self._ended = self._ended, []
        if len(serving) < len(live):
            return
        leaving = [r for r in self.replicas if r.ended is None and r.successor is not None]
        for replica in leaving:  # draining already, or whose successors serve by now
            self._drain(replica, now)
        if leaving or (live and now - self._changed < goal.cooldown_s):
            return
        use = sum(replica.use() for replica in serving) / max(1, len(serving))
        pressure = self._pressure(ended, last, now)
        if goal.layouts:
            self._resize(serving, pressure, use, now)
            return
        wanted = desired_replicas(len(live), pressure, use, least=goal.min, most=goal.max)
        if wanted == len(live):
            return
        self._changed = now
        self.scaled.append((now, len(live), wanted))
        for _ in range(len(live), wanted):
            self._start(self.layouts[0], now)
        if wanted < len(live):
            self._drain(min(reversed(serving), key=lambda replica: replica.load().requests), now)

    def _resize(self, serving: Sequence[Replica], pressure: float, use: float, now: float) -> None:
        """Has the smallest replica, or the idlest of the largest, give way to one of the next layout."""
        least = min(serving, key=lambda replica: replica.layout.devices)
        most = min(serving, key=lambda replica: (-replica.layout.devices, replica.load().requests))
        up = next((x for x in self.layouts if x.devices > least.layout.devices), least.layout)
        down = next((x for x in reversed(self.layouts) if x.devices < most.layout.devices), most.layout)
        size = sum(replica.layout.devices for replica in serving)
        larger = size - least.layout.devices + up.devices
        smaller = size - most.layout.devices + down.devices
        wanted = desired_size(size, pressure, use, smaller=smaller, larger=larger)
        if wanted == size:
            return
        replica, layout = (least, up) if wanted > size else (most, down)
        self._changed, replica.successor = now, layout
        self.scaled.append((now, replica.layout.name, layout.name))
        if self.fleet.autoscale.surge:
            self._start(layout, now)
        else:
            self._drain(replica, now)

    def _pressure(self, ended: Sequence[RequestOutput], last: float, now: float) -> float:
        """Returns what was observed since an instant over what is allowed, see `desired_replicas`."""
        goal, slo, asked = self.fleet.autoscale, self.costs.slo, [r.output for r in self._sent.values()]
        if goal.queue_ms is not None:
            times = [output.metrics for output in (*ended, *asked)]
            begun = [(now if t.scheduled_time is None else t.scheduled_time, t.arrival_time) for t in times]
            waits = [begin - arrival for begin, arrival in begun if begin >= last]
            return 1e3 * sum(waits) / len(waits) / goal.queue_ms if waits else 0.0
        missed = [not slo.met_by(RequestRecord.from_output(output)) for output in ended]
        waiting = [now - output.metrics.arrival_time for output in asked if not output.metrics.token_times]
        missed += [True for wait in waiting if 1e3 * wait > (slo.ttft_ms or math.inf)]
        return sum(missed) / len(missed) / (1 - (goal.attainment or 0.0)) if missed else 0.0

    # -- facts ---------------------------------------------------------------------------------------------

    @property
    def scheduling(self) -> SchedulingConfig:
        return self.config.scheduling

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        return self._on_step

    @on_step.setter
    def on_step(self, observer: Callable[[StepRecord], None] | None) -> None:
        self._on_step = observer
        for replica in self.replicas:
            replica.engine.on_step = observer

    def check(self, params: SamplingParams) -> None:
        """Accepts all: no token depends on it."""

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "simulated",
            "replicas": len(self.replicas),
            "batching": self.batching,
        }

    def stats(self) -> dict[str, Any]:
        engines = [replica.engine for replica in self.replicas]
        failed = sum(engine.stats.failed_steps for engine in engines)
        return {
            "block_size": self.config.block_size,
            "failed_steps": failed,
            "steps": sum(e.stats.steps for e in engines),
        }

    def parts(self) -> dict[tuple[str, str], float]:
        """Returns simulated seconds by (kind of operation, source), over all replicas."""
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for replica in self.replicas:
            for key, value in replica.runner.parts.items():
                seconds[key] += value
        return seconds

    def fleet_row(self) -> dict[str, Any]:
        """Returns what the glossary's "Simulation" has of fleets: replicas, what they cost, what was sent."""
        end = max(replica.clock.now for replica in self.replicas)
        power, sites = self.fleet.power, self.fleet.sites
        alive = [
            max(0.0, min(end, end if r.ended is None else r.ended) - r.since) * r.layout.devices
            for r in self.replicas
        ]
        watts = {"prefill": power.prefill_w, "decode": power.decode_w}
        joules = 0.0
        for replica, seconds in zip(self.replicas, alive, strict=True):
            busy = {name: replica.layout.devices * s for name, s in replica.runner.phase_s.items()}
            joules += sum(watts[name] * s for name, s in busy.items())
            joules += power.idle_w * max(0.0, seconds - sum(busy.values()))

        def most(of: Callable[[Replica], int]) -> int:
            """Returns the most of something that replicas have at a time."""
            changes = [(r.since, of(r)) for r in self.replicas]
            changes += [(r.ended, -of(r)) for r in self.replicas if r.ended]
            return max(itertools.accumulate(change for _, change in sorted(changes)))

        row: dict[str, Any] = {
            "replicas": most(lambda replica: 1),
            "num_devices": most(lambda replica: replica.layout.devices),
            "num_blocks": most(lambda replica: replica.engine.scheduler.allocator.num_blocks),
            "device_seconds": sum(alive),
            "requeued": self._requeued,
            "kv_sent_bytes": self.sent["bytes"],
            "mean_kv_sent_ms": 1e3 * self.sent["seconds"] / max(1, self.sent["times"]),
        }
        if self.fleet.autoscale.enabled:
            row["scale_events"] = [{"at_s": at, "from": old, "to": new} for at, old, new in self.scaled]
        if self.config.rebalance.every_steps:
            for name in ("rebalances", "rebalance_bytes", "rebalance_seconds"):
                row[name] = sum(getattr(replica.engine.stats, name) for replica in self.replicas)
        counted: Counter[str] = Counter()
        for replica in self.replicas:
            counted.update(replica.runner.assignments)
        chosen, names = counted.pop("chosen", 0.0), {"heaviest": "expert_imbalance"}
        row |= {names.get(key, f"{key}_share"): amount / chosen for key, amount in counted.items()}
        tokens = self._tokens
        if tokens and (power.idle_w or power.prefill_w or power.decode_w):
            row["assumed_joules_per_output_token"] = joules / tokens
        if tokens and sites:
            price = sum(sites[r.site].price_per_hour * s for r, s in zip(self.replicas, alive, strict=True))
            row["cost_per_million_output_tokens"] = price / 3600 / tokens * 1e6
        return row
