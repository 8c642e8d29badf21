"""Compiles many kernels in a few subprocesses, each distinct one once, remembered between runs."""

import contextlib
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# A kernel that takes longer than this counts as one that does not compile.
SECONDS_PER_KERNEL = 180


def triton_version() -> str:
    """Returns the version of the Triton wheel.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            "the static report compiles with the Triton wheel, which is not installed: "
            "pip install 'moejax[static]' (Linux)"
        ) from None


class Compiler:
    """A pool of compiling subprocesses.

    Args:
        workers: subprocesses.
        cache: folder for results, by content hash of job and Triton version; None keeps none.
    """

    def __init__(self, workers: int = 2, cache: Path | None = None) -> None:
        self.version = triton_version()
        self.workers, self.cache = workers, cache
        self.compiled = 0
        # Its threads have a subprocess each, which takes seconds to import Triton: both last until the end.
        self._pool = ThreadPoolExecutor(workers)
        self._mine = threading.local()
        self._started: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._started:  # a thread that waits for one sees the end of its stream
            process.kill()
        self._pool.shutdown()
        for process in self._started:
            _end(process)
        self._started.clear()

    def compile(self, jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the jobs' results, in order: see `pallas_kernels.static.worker`.

        Compiling starts while `jobs`, which may be a generator, is still being drawn from.
        """
        keys, results = [], dict[str, Future[dict[str, Any]]]()
        for job in jobs:
            keys.append(key := self._key(job))
            if key not in results:
                results[key] = self._pool.submit(self._one, key, job)
        return [results[key].result() for key in keys]

    def _key(self, job: dict[str, Any]) -> str:
        text = json.dumps({"job": job, "triton": self.version, "worker": _WORKER_HASH}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _one(self, key: str, job: dict[str, Any]) -> dict[str, Any]:
        path = None if self.cache is None else self.cache / key[:2] / f"{key}.json"
        if path is not None and path.exists():
            return json.loads(path.read_text())
        result = self._run(job)
        with self._lock:
            self.compiled += 1
        # A compiler that died may have been killed for memory: not to be remembered.
        if path is not None and not result.get("died"):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{threading.get_ident()}.part")
            partial.write_text(json.dumps(result))
            partial.replace(path)
        return result

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process()
        if process.poll() is not None:  # it died after its last answer
            self._mine.process = None
            process = self._process()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(SECONDS_PER_KERNEL, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        code = _end(process)
        self._mine.process = None
        return {"error": f"the compiler died with exit code {code}", "died": True}

    def _process(self) -> "subprocess.Popen[str]":
        process = getattr(self._mine, "process", None)
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "pallas_kernels.static.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            self._mine.process = process
            with self._lock:
                self._started.append(process)
        return process


def _end(process: "subprocess.Popen[str]") -> int:
    """Kills a subprocess and closes its pipes; returns its exit code."""
    process.kill()
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # it died before it read all that was written
                stream.close()
    return code


_WORKER_HASH = hashlib.sha256((Path(__file__).parent / "worker.py").read_bytes()).hexdigest()
