"""The engine of prompts in a process of its own, at the other end of a socket pair that nobody else can reach.

A message is a header, JSON and arrays one after another, under one checksum. Every wait has its deadline: who
is killed, stops or sends what is damaged is lost (`PeerLost`). The process ends when this one does.
"""

import contextlib
import json
import os
import pickle
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from moejax.core.errors import ConfigError, MoejaxError
from moejax.engine.disaggregated.prefill import (
    Asked,
    Blocks,
    PeerLost,
    Prefill,
    Prefilled,
    as_json,
    from_json,
)
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Logprob, SamplingParams

_HEAD = struct.Struct("!IQI")  # bytes of JSON, bytes of arrays, checksum of both
_TURN_S = 0.02  # longest wait for a message before a caller has its turn


class Connection:
    """One end of a socket pair. A thread reads, so that no sender waits for this process's steps.

    Attributes:
        heard: when the other end was heard of last, `time.monotonic()` seconds.
    """

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._end, self.heard = end, time.monotonic()
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message. Raises `PeerLost` where nobody takes it in time."""
        text = json.dumps(header).encode()
        parts = [text, *(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data for each in arrays)]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        head = _HEAD.pack(len(text), sum(map(len, parts)) - len(text), crc)
        try:
            for part in (head, *parts):
                self._end.sendall(part)
        except OSError as error:
            raise PeerLost(f"it takes no message ({error.strerror})") from error

    def receive(self, timeout_s: float | None) -> tuple[dict[str, Any], memoryview] | None:
        """Returns the next message, None if there is none in time. Raises `PeerLost`."""
        try:
            frame = self._frames.get(timeout=timeout_s) if timeout_s != 0 else self._frames.get_nowait()
        except queue.Empty:
            return None
        if isinstance(frame, PeerLost):
            self._frames.put(frame)  # for whoever asks again
            raise frame
        return frame

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self) -> None:
        try:
            while True:
                length, size, crc = _HEAD.unpack(self._exactly(_HEAD.size))
                data = self._exactly(length + size)
                if zlib.crc32(data) != crc:
                    raise PeerLost("what it sent has another checksum")
                self._frames.put((json.loads(bytes(data[:length])), data[length:]))
        except PeerLost as lost:
            self._frames.put(lost)
        except (OSError, MemoryError, ValueError) as error:
            self._frames.put(PeerLost(f"it cannot be read ({error})"))

    def _exactly(self, count: int) -> memoryview:
        data = memoryview(bytearray(count))
        done = 0
        while done < count:
            got = self._end.recv_into(data[done:])
            if not got:
                raise PeerLost("its connection has ended")
            done, self.heard = done + got, time.monotonic()
        return data


class PrefillProcess:
    """An engine of prompts in another process, with weights of its own.

    On GPUs both processes see all devices: give this one others (`ParallelConfig.first_device`), and set
    XLA_PYTHON_CLIENT_PREALLOCATE=false, or either takes most of all memory.

    Args:
        model, options: as for `LLM`.
        timeout_s: the longest silence while it has prompts to compute; a step is to take less.
        start_timeout_s: the longest wait for it to have opened the model, or to have compiled its steps.

    Raises:
        ConfigError: what `LLM` raises there, or `prepare`.
        PeerLost: it does not start.
    """

    def __init__(
        self, model: Any, *, timeout_s: float = 60.0, start_timeout_s: float = 600.0, **options: Any
    ) -> None:
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self._options = {"model": model, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self.start()

    def start(self) -> None:
        """Starts it, anew if it is there, and waits until it has opened the model."""
        self.close()
        mine, theirs = socket.socketpair()
        call = f"from moejax.engine.disaggregated.process import main; main({theirs.fileno()})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            environment["JAX_NUM_CPU_DEVICES"] = str(jax.local_device_count())
        self._process = subprocess.Popen(
            [sys.executable, "-c", call],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True, env=environment,
        )  # fmt: skip
        theirs.close()
        self._connection = Connection(mine, self.timeout_s)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((self.timeout_s, self._options), self._process.stdin)
            self._process.stdin.close()
        self._asked: dict[str, None] = {}
        self._since = time.monotonic()
        told, _ = self._wait()
        self.blocks = Blocks(told["model"], [(tuple(shape), dtype) for shape, dtype in told["arrays"]])

    def submit(self, asked: Asked) -> None:
        """Sends a prompt."""
        if not self._asked:
            self._since = time.monotonic()
        self._asked[asked.number] = None
        self._send({"op": "submit", **as_json(asked)})

    def abort(self, number: str) -> None:
        """Has it end a prompt."""
        self._send({"op": "abort", "number": number})

    def poll(self, wait: bool) -> list[Prefilled]:
        """Returns the prompts that have come; waits a moment for one if it is to.

        Raises:
            PeerLost: it is gone, or silent for too long; it is ended then.
        """
        done = list[Prefilled]()
        try:
            while (frame := self._connection.receive(_TURN_S if wait and not done else 0)) is not None:
                if frame[0]["op"] == "done":
                    done.append(self._prefilled(*frame))
        except PeerLost as lost:
            raise self._gone(lost) from lost
        silent = time.monotonic() - max(self._connection.heard, self._since)
        if self._asked and silent > self.timeout_s:
            raise self._gone(PeerLost(f"it said nothing for {self.timeout_s:g} s and was ended"))
        return done

    def warmup(self, max_total_len: int, sampling_params: list[SamplingParams]) -> None:
        """Has it compile all steps."""
        params = list(map(asdict, sampling_params))
        self._send({"op": "warmup", "max_total_len": max_total_len, "sampling_params": params})
        self._wait()

    def forget(self) -> None:
        """Has it forget prefixes."""
        self._send({"op": "forget"})

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()

    def _prefilled(self, told: dict[str, Any], data: memoryview) -> Prefilled:
        del told["op"]
        self._asked.pop(told["number"], None)
        logprobs = [each and _logprob(each) for each in told["logprobs"]]
        n, at, arrays = len(data) // self.blocks.nbytes, 0, list[np.ndarray]()
        for shape, dtype in self.blocks.arrays if n else ():
            count = n * int(np.prod(shape))
            arrays.append(np.frombuffer(data, dtype, count, at).reshape(n, *shape))
            at += arrays[-1].nbytes
        return Prefilled(**told | {"logprobs": logprobs, "arrays": arrays})

    def _send(self, header: dict[str, Any]) -> None:
        try:
            self._connection.send(header)
        except PeerLost as lost:
            raise self._gone(lost) from lost

    def _wait(self) -> tuple[dict[str, Any], memoryview]:
        """Waits for an answer that is no prompt."""
        until = time.monotonic() + self.start_timeout_s
        try:
            while (left := until - time.monotonic()) > 0:
                if (frame := self._connection.receive(left)) is not None and frame[0]["op"] == "ready":
                    return frame
                if frame is not None and frame[0]["op"] == "error":
                    self.close()
                    raise ConfigError(frame[0]["message"])
        except PeerLost as lost:
            raise self._gone(lost) from lost
        raise self._gone(PeerLost(f"it is not ready after {self.start_timeout_s:g} s"))

    def _gone(self, lost: PeerLost) -> PeerLost:
        """Ends it, and says what became of it."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # its own end says more than ours
        code = self._process.poll()
        self.close()
        self._asked.clear()
        ending = f", killed by signal {-code}" if code and code < 0 else f", exit code {code}" if code else ""
        return PeerLost(f"disaggregate: the process of prompts: {lost}{ending}")


def _logprob(fields: dict[str, Any]) -> Logprob:
    return Logprob(**fields | {"top": {int(token): x for token, x in fields["top"].items()}})


def main(fd: int) -> None:
    """Runs the engine of prompts for the process that has started this one, until that goes."""
    timeout_s, options = pickle.load(sys.stdin.buffer)
    connection = Connection(socket.socket(fileno=fd), timeout_s)
    try:
        prefill = Prefill(LLM(**options))
    except MoejaxError as error:
        connection.send({"op": "error", "message": str(error)})
        return
    with contextlib.suppress(PeerLost):
        connection.send({"op": "ready", **prefill.blocks._asdict()})
        serve(connection, prefill, min(1.0, timeout_s / 4))


def serve(connection: Connection, prefill: Prefill, beat_s: float) -> None:
    """Computes prompts until the other end is gone (`PeerLost`), and says at least every `beat_s` seconds,
    between steps, that it is there."""
    beat = time.monotonic()
    while True:
        while (frame := connection.receive(0 if prefill.busy else None)) is not None:
            told = frame[0]
            match told.pop("op"):
                case "submit":
                    prefill.submit(from_json(told))
                case "abort":
                    prefill.abort(told["number"])
                case "forget":
                    prefill.forget()
                case "warmup":
                    params = [SamplingParams(**each) for each in told["sampling_params"]]
                    prefill.warmup(told["max_total_len"], params)
                    connection.send({"op": "ready"})
        for done in prefill.poll(wait=True):
            told = {**done._asdict(), "logprobs": [each and asdict(each) for each in done.logprobs]}
            connection.send({**told, "op": "done", "arrays": None}, done.arrays)
            beat = time.monotonic()
        if time.monotonic() - beat > beat_s:
            beat = time.monotonic()
            connection.send({"op": "beat"})
