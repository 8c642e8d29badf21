"""Warm-up, the recording pass and the timed iterations of a latency experiment."""

from collections.abc import Iterator, Sequence

from moejax.bench.backends.moejax import MoejaxBackend, engine_of
from moejax.bench.common.compilation import shown_compilation
from moejax.bench.common.trace_io import start_capture, take_capture
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.latency.cases import CaseData, prepare_peer, run_case
from moejax.bench.workload import WorkloadConfig
from moejax.engine.requests.api import RequestOutput
from moejax.report.progress import Task, progress
from moejax.results.metrics import RequestRecord


def measure(data: Sequence[CaseData], workload: WorkloadConfig, run: ExperimentRun) -> None:
    """Fills `data`: warm-up, routing pass, then the timed iterations."""
    ours = [index for index, item in enumerate(data) if engine_of(item.backend) is not None]
    total = len(data) * (workload.warmup + workload.iterations) + len(ours)
    with progress("compiling and warming up", total=total) as task:
        _warm_up(data, workload, task)
        task.describe("recording routing")
        for index in ours:
            _record(data[index], workload, index)
            task.advance()
        for item in data:
            if (llm := engine_of(item.backend)) is not None:
                llm.ledger.warmed_up = workload.warmup > 0
        task.describe("measuring")
        run.read_peaks()
        for iteration in range(workload.iterations):
            for index in _turns(data, iteration):
                with run.meter.part(index):
                    _time(data[index], workload, index)
                task.advance()
        run.read_peaks()


def _warm_up(data: Sequence[CaseData], workload: WorkloadConfig, task: Task) -> None:
    """Prepares the peers, compiles our own engines' steps and runs every case."""
    peers = {id(item.backend): item.backend for item in data if engine_of(item.backend) is None}
    for backend in peers.values():
        task.describe(f"warming up {backend.name}")
        prepare_peer(backend, workload, [item.case for item in data if item.backend is backend])
    for llm in {id(llm): llm for item in data if (llm := engine_of(item.backend)) is not None}.values():
        with shown_compilation(llm, task):
            mine = [item for item in data if engine_of(item.backend) is llm]
            batches = [(item.prompts, workload.batch_sampling(item.case)) for item in mine]
            llm.compile_for(batches, record_routing=True)
    task.describe("warming up")
    for item in data:
        for _ in range(workload.warmup):
            run_case(item.backend, item.case, item.prompts, workload)
            task.advance()


def _record(item: CaseData, workload: WorkloadConfig, index: int) -> None:
    """One pass of our own engine that counts what the experts are given; not timed."""
    backend = item.backend
    assert isinstance(backend, MoejaxBackend)
    llm = backend.llm
    llm.routing.reset()
    start_capture(llm)
    run_case(backend, item.case, item.prompts, workload, record_routing=True)
    item.counts = {phase: counts.copy() for phase, counts in llm.routing.counts.items()}
    item.overflow = dict(llm.routing.overflow)
    item.hits = llm.routing.mean_hits
    item.trace = take_capture(llm, index)


def _turns(data: Sequence[CaseData], iteration: int) -> Iterator[int]:
    """Places in `data`: case by case, and within a case every other iteration from the last backend to the
    first, so that none always runs behind the same neighbour."""
    cases: dict[str, list[int]] = {}
    for index, item in enumerate(data):
        cases.setdefault(item.case.name, []).append(index)
    for places in cases.values():
        yield from places if iteration % 2 == 0 else reversed(places)


def _time(item: CaseData, workload: WorkloadConfig, index: int) -> None:
    """One timed pass."""
    start_capture(engine_of(item.backend))  # else the trace of all passes would pile up
    outputs = run_case(item.backend, item.case, item.prompts, workload)
    records, start, end = batch_records(outputs, index)
    item.durations.append(end - start)
    item.records += records
    item.tokens = item.tokens or [list(output.outputs[0].token_ids) for output in outputs]


def batch_records(outputs: Sequence[RequestOutput], case: int) -> tuple[list[RequestRecord], float, float]:
    """Returns a batch's records, when its requests arrived, and when the last of its tokens came."""
    start = min(output.metrics.arrival_time for output in outputs)
    end = max(output.metrics.token_times[-1] for output in outputs)
    return [RequestRecord.from_output(output, case=case) for output in outputs], start, end
