"""A peer in a process of its own: requests there and back, and every way in which it can end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moejax.bench.backends import process
from moejax.bench.backends.base import BackendError
from moejax.bench.backends.peer import WORKERS, WorkerBackend
from moejax.bench.backends.process import Worker
from moejax.bench.driver import drive
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload
from moejax.core.errors import RequestError
from moejax.engine.requests.api import SamplingParams
from tests.bench.backends.peers import open_fake, tokens

PROMPTS = [[1, 2, 3], [50, 60], [7]]


def greedy(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)


def gone(backend: WorkerBackend) -> bool:
    """Ended and waited for: no process and no zombie."""
    pid = backend._worker._process.pid
    return backend._worker._process.returncode is not None and not Path(f"/proc/{pid}").exists()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[WorkerBackend]:
    backend = open_fake(tmp_path)
    yield backend
    backend.close()
    assert gone(backend)


# --- requests -----------------------------------------------------------------------------------------------


def test_generate_gives_every_token_its_instant_on_our_clock(peer: WorkerBackend) -> None:
    peer.prepare(max_num_seqs=3, max_total_len=8, params=[greedy(1)])
    before = time.perf_counter()
    outputs = peer.generate(PROMPTS, [greedy(length) for length in (4, 1, 3)])
    after = time.perf_counter()
    for prompt, output, length in zip(PROMPTS, outputs, (4, 1, 3), strict=True):
        assert output.outputs[0].token_ids == tokens(prompt, length) and output.prompt_token_ids == prompt
        assert output.outputs[0].finish_reason == "length" and output.finished
        instants = [before, output.metrics.arrival_time, *output.metrics.token_times, after]
        assert instants == sorted(instants) and len(output.metrics.token_times) == length
        assert output.metrics.scheduled_time is not None


def test_what_it_says_of_itself(peer: WorkerBackend) -> None:
    assert (peer.vocab_size, peer.max_model_len, peer.batching, peer.seed) == (100, 64, "continuous", None)
    facts = peer.describe()
    assert facts["versions"] == {"fake": "1.0"} and facts["token_instants"] == "each step"
    memory = peer.memory()
    assert memory["model_bytes"] == 1234 and memory["process_peak_bytes"] > 1e6


def test_it_serves_requests_that_arrive_over_time(peer: WorkerBackend) -> None:
    """More requests than it runs at a time, one after a pause; every step is told."""
    asked = [PlannedRequest(0.0, [k], 1 + k % 3) for k in range(6)] + [PlannedRequest(0.3, [9], 2)]
    peer.prepare(max_num_seqs=2, max_total_len=8, params=[greedy(1)])
    run = drive(peer, asked, ThroughputWorkload().sampling)
    for item, planned in zip(run.served, asked, strict=True):
        assert item.record.completed and item.queue_s is not None and item.queue_s >= 0
        assert list(item.token_ids) == tokens(planned.prompt_token_ids, planned.output_len)
    assert max(step.running for step in run.steps) == 2 and max(step.waiting for step in run.steps) >= 3
    assert sum(step.prefill_tokens for step in run.steps) == 7
    assert sum(step.prefill_tokens + step.decode_tokens for step in run.steps) == sum(
        asked.output_len for asked in asked
    )
    assert run.served[-1].record.metrics.arrival_time == pytest.approx(run.start + 0.3)
    assert peer.step() is False and peer.on_step is None


def test_aborted_requests_end_with_what_they_have(tmp_path: Path) -> None:
    peer = open_fake(tmp_path, step_s=0.005)
    peer.prepare(max_num_seqs=1, max_total_len=4000, params=[greedy(1)])
    first, second = peer.submit([1], greedy(3000)), peer.submit([2], greedy(2))
    for _ in range(2):
        peer.step()
    peer.abort(first.request_id)
    while peer.step():
        pass
    assert first.outputs[0].finish_reason == "abort" and 1 <= len(first.outputs[0].token_ids) < 3000
    assert second.outputs[0].token_ids == tokens([2], 2)
    peer.close()


def test_large_messages_both_ways_do_not_wait_for_each_other(peer: WorkerBackend) -> None:
    """Many times what a pipe holds, while the worker's own lines are not being read."""
    peer.prepare(max_num_seqs=4, max_total_len=60_000, params=[greedy(1)])
    live = [peer.submit([3] * 20, greedy(400)) for _ in range(4)]
    peer.step()
    time.sleep(0.2)
    live += [peer.submit([1] * 50_000, greedy(2)) for _ in range(4)]
    while peer.step():
        pass
    assert all(output.finished for output in live)


ELSEWHERE = {
    "n": 2, "logprobs": 0, "prompt_logprobs": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "bad_words": ["x"], "min_tokens": 2, "stop": "x",
    "stop_token_ids": [3], "max_time_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{name: value} for name, value in ELSEWHERE.items()])
def test_what_it_cannot_do_is_refused(peer: WorkerBackend, fields: dict) -> None:
    (name,) = fields
    with pytest.raises(RequestError, match=f"backend fake has no {name}=.*backend=moejax does"):
        peer.generate([[1]], [SamplingParams(**fields)])


# --- ends ---------------------------------------------------------------------------------------------------

DEATHS = {
    "exit": "its process ended with code 3; last line of .*backend-fake.log: about to exit",
    "kill": "its process was killed by signal 9; last line of .*: about to kill",
    "hang": r"said nothing for 0.5 s and was ended \(backend.timeout_s\); last line of .*: about to hang",
    "garbage": "said something that is no message of a worker: 'this is no JSON'",
    "say": "backend fake: the cache is full",
}


@pytest.mark.parametrize("fail", DEATHS)
@pytest.mark.parametrize("serving", [False, True])
def test_a_worker_that_fails_is_one_line_and_leaves_no_process(
    tmp_path: Path, fail: str, serving: bool
) -> None:
    # A loaded machine may take its time to start an interpreter; only then may it be short.
    peer = open_fake(tmp_path, fail=fail, at=2)
    peer._worker.timeout_s = 0.5 if fail == "hang" else 60.0
    with pytest.raises(BackendError, match=DEATHS[fail]):
        if serving:
            peer.submit([1], greedy(9))
            while peer.step():
                pass
        else:
            peer.generate([[1]], [greedy(9)])
    peer.close()
    assert gone(peer)
    assert "loading went well" in (tmp_path / "backend-fake.log").read_text()


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("load", "backend fake: cannot load it: no such weights"),
        ("module", r"hf_transformers needs the package transformers.*moejax\[hf\].*fake.python=PYTHON"),
        ("defect", "backend fake: KeyError: 'a defect'"),
    ],
)
def test_a_worker_that_cannot_load(tmp_path: Path, fail: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        open_fake(tmp_path, fail=fail)
    # Nothing is written where only a package is missing.
    assert list(tmp_path.iterdir()) == ([] if fail == "module" else [tmp_path / "backend-fake.log"])


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(BackendError, match=r"cannot start .*python'"):
        open_fake(tmp_path, python=str(tmp_path / "python"))


def test_a_worker_that_ignores_its_stdin_is_ended_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_CLOSE_S", 0.2)
    script = tmp_path / "deaf.py"
    script.write_text("import time\ntime.sleep(600)\n")
    worker = Worker("deaf", sys.executable, script, tmp_path / "log", 60.0)
    worker.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_it_ends_when_this_process_is_killed(tmp_path: Path) -> None:
    """The worker's stdin ends with its parent, however that ends."""
    program = (
        "import sys; from pathlib import Path; from tests.bench.backends.peers import open_fake\n"
        "print(open_fake(Path(sys.argv[1]))._worker._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z" and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or _state(pid) == "Z"  # the container's init may be slow to wait


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_another_clock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moejax.bench.backends.peer.time.perf_counter", lambda: 1e12)
    with pytest.raises(BackendError, match="clock is not this one's"):
        open_fake(tmp_path)


def test_the_workers_are_files_that_can_be_run_without_us() -> None:
    """Shipped, and importing nothing of moejax."""
    names = {path.name for path in WORKERS.glob("*.py")}
    assert names == {"serve.py", "hf_worker.py", "llama_worker.py"}
    assert not any("moejax" in line and "import" in line.split("#")[0]
                   for path in WORKERS.glob("*.py") for line in path.read_text().splitlines())  # fmt: skip
