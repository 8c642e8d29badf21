"""The measured passes of an A/B run: a plan of cases, and for each a way to run it once on a backend.

A case is run on all arms before the next case comes, so that a pair's two passes are moments apart. The
order within it is drawn at random, and the next round takes it backwards: a drift of the machine and the
effect of who ran before then fall on all alike.
"""

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax.bench.ab.variants import Arm
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import engine_of
from moejax.bench.backends.peer_ratios import blank_unknown
from moejax.bench.driver import TrafficRun, drive
from moejax.bench.latency.cases import plan_batches, prepare_peer, run_case
from moejax.bench.latency.measure import batch_records
from moejax.bench.throughput.measure import warm_up
from moejax.bench.throughput.modes import Mode, plan_traffic
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload, plan_fields
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.engine.requests.api import RequestOutput
from moejax.report.progress import Task, progress
from moejax.results.metrics import Metrics, RequestRecord, compute_metrics, record_row
from moejax.sharding.distributed import agree


class BatchLoad:
    """Fixed batches, as `experiments.latency` has them: the cases that every arm is given.

    Attributes:
        cases: each case's fields in its row.
        records: of all measured passes, by id of the backend and case.
        hits: phase → experts visited in a mean step `[L]`, likewise, where it was recorded.
        drafting: whether an engine drafts, and all record it: their steps then count at all times, so that
            what is timed and what records are the same programs.
        planned: whether all engines' steps can be known; else all have the buckets of a warm-up.

    Raises:
        ConfigError: a case longer than a backend's model allows.
    """

    def __init__(self, workload: WorkloadConfig, backends: Sequence[Backend]) -> None:
        self.workload = workload
        self.plan = plan_batches(backends, workload)
        self.cases: list[dict[str, Any]] = [dataclasses.asdict(case) for case, _ in self.plan]
        self.records: dict[tuple[int, int], list[RequestRecord]] = defaultdict(list)
        self.hits: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        engines = [llm for backend in backends if (llm := engine_of(backend)) is not None]
        self.drafting = any(llm.engine_config.speculation.most for llm in engines)
        self.planned = not any(llm.engine_config.steps_vary for llm in engines)

    def _generate(self, backend: Backend, index: int, **options: Any) -> list[RequestOutput]:
        return run_case(backend, *self.plan[index], self.workload, **options)

    def warm_up(self, backend: Backend, case: int) -> None:
        """Compiles for all cases with the first one, and runs a case."""
        llm = engine_of(backend)
        if case == 0 and llm is None:
            prepare_peer(backend, self.workload, [item for item, _ in self.plan])
        elif case == 0 and llm is not None:
            batches = [(prompts, self.workload.batch_sampling(each)) for each, prompts in self.plan]
            llm.compile_for(batches, record_routing=self.drafting, planned=self.planned)
            llm.ledger.warmed_up = False  # a step may differ from the planned one: requests that end early
        # At least once: a variant that compiles while it is measured would be measured for that.
        for _ in range(max(1, self.workload.warmup)):
            self._generate(backend, case)

    def run(self, backend: Backend, case: int) -> tuple[Metrics, list[dict[str, Any]]]:
        """Runs a case once: its metrics, and rows of requests.jsonl."""
        records, start, end = batch_records(self._generate(backend, case), case)
        self.records[id(backend), case] += records
        metrics = compute_metrics(records, end - start, self.workload.slo)
        return metrics, [record_row(record, start) for record in records]

    def record_hits(self, backend: Backend, case: int) -> None:
        """Runs a case once of our own engine, and keeps which experts its steps visit."""
        if (llm := engine_of(backend)) is not None:
            llm.routing.reset()
            self._generate(backend, case, record_routing=True)
            self.hits[id(backend), case] = llm.routing.mean_hits

    def tokens(self, backend: Backend, case: int) -> list[list[int]]:
        """Returns the output token ids of a pass that is not timed."""
        return [list(output.outputs[0].token_ids) for output in self._generate(backend, case)]


class TrafficLoad:
    """Requests that arrive over time, as `experiments.throughput` has them: one case, or one for each number
    of users. Members are those of `BatchLoad`.

    Args:
        tenant, alone: see `AbSection`, with backends for variants.

    Raises:
        ConfigError: a request that does not fit a backend's model or cache, a tenant without any, or the
            clock decides how many there are.
    """

    def __init__(
        self, workload: ThroughputWorkload, backends: Sequence[Backend], tenant: str | None = None,
        alone: Sequence[Backend] = (),
    ) -> None:  # fmt: skip
        if workload.duration_s is not None:
            raise ConfigError(
                "an A/B run needs the same requests in every pass: leave out workload.duration_s"
            )
        self.workload = workload
        self.plan = plan_traffic(backends, workload)
        self.records: dict[tuple[int, int], list[RequestRecord]] = defaultdict(list)
        self.loads = [dataclasses.replace(workload, concurrency=users) for users in workload.users]
        self.tenant, self._alone = tenant, {id(backend) for backend in alone}
        own = [asked for asked in self.plan if tenant in (None, asked.options.tenant)]
        self.own = [  # a conversation is one tenant's, its requests one after the other
            dataclasses.replace(asked, follows=None if asked.follows is None else place - 1)
            for place, asked in enumerate(own)
        ]
        if not own:
            known = sorted({asked.options.tenant for asked in self.plan})
            raise ConfigError(f"ab.tenant: {unknown('tenant', str(tenant), known)}")
        self.cases: list[dict[str, Any]] = [
            {**plan_fields(self.plan, load), "batch_size": len(self.own)} for load in self.loads
        ]

    def _sent(self, backend: Backend) -> list[PlannedRequest]:
        return self.own if id(backend) in self._alone else self.plan

    def _of_tenant(self, passed: TrafficRun) -> TrafficRun:
        """Returns a pass as if its tenant's requests had been all."""
        own = tuple(one for one in passed.served if self.tenant in (None, one.record.options.tenant))
        return dataclasses.replace(passed, served=own)

    def warm_up(self, backend: Backend, case: int) -> None:
        if not case:
            warm_up(Mode(backend, self.plan, self.workload), self.workload)

    def run(self, backend: Backend, case: int) -> tuple[Metrics, list[dict[str, Any]]]:
        backend.reset_stats()
        gc.collect()
        load = self.loads[case]
        passed = drive(backend, self._sent(backend), load.sampling, workload=load, case=case, agree=agree)
        passed.require_completed(backend.name)
        if load.mix:
            self.records[id(backend), case] += [item.record for item in passed.measured]
        return self._of_tenant(passed).metrics(self.workload.slo), passed.rows(self.workload.slo)

    def tokens(self, backend: Backend, case: int) -> list[list[int]]:
        at_once = [dataclasses.replace(request, arrival_s=0.0) for request in self._sent(backend)]
        passed = drive(backend, at_once, self.workload.sampling, agree=agree)
        if error := next((request.error for request in passed.served if request.error), None):
            raise RequestError(error)
        return [list(request.token_ids) for request in self._of_tenant(passed).served]


Load = BatchLoad | TrafficLoad


def warm_up_all(arms: Sequence[Arm], load: Load) -> None:
    """Compiles and warms up every arm, and keeps the tokens that each gives for the same requests. From
    here on a compilation is a defect."""
    count = len(load.cases)
    with progress("compiling and warming up", total=len(arms) * count) as task:
        for arm in arms:
            task.describe(f"compiling and warming up ({arm.name})")
            for case in range(count):
                load.warm_up(arm.backend, case)
                arm.tokens[case] = load.tokens(arm.backend, case)
                if isinstance(load, BatchLoad) and load.drafting:
                    load.record_hits(arm.backend, case)
                task.advance()
            if (llm := engine_of(arm.backend)) is not None:
                llm.ledger.warmed_up = True


def orders(arms: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yields the arms' order of every round: drawn at random in even rounds, the last one backwards in odd
    ones."""
    while True:
        order = [int(i) for i in rng.permutation(arms)]
        yield order
        yield order[::-1]


def run_rounds(
    arms: Sequence[Arm], load: Load, rounds: range, order: Iterator[list[int]], task: Task
) -> None:
    """Measures all arms in every round; fills them."""
    for round_ in rounds:
        gc.collect()  # now, and not on one arm's behalf in another's time
        turns = next(order)
        for case in range(len(load.cases)):
            for position, index in enumerate(turns):
                arm = arms[index]
                metrics, rows = load.run(arm.backend, case)
                known = arm.backend.itl_known
                arm.rounds[round_, case] = blank_unknown(metrics, itl_known=known)
                extra = {"variant": arm.name, "iteration": round_, "position": position}
                arm.rows += [{**row, "case": case, **extra} for row in rows]
        task.advance()
