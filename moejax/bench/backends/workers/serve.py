"""The worker's half of the protocol, and what its engines share. Run by a peer's interpreter: standard
library only, nothing of moejax.

Lines of JSON come on stdin and go to what was stdout (stdout itself then leads to stderr, so that nothing
that a library prints gets between them). While there is nothing to do the worker blocks on a read; at the end
of stdin it ends. Instants are `time.perf_counter()` seconds, on Linux the machine's CLOCK_MONOTONIC, as in
the process that started it (`ping` lets that process check).

In:   load {options}; prepare {max_num_seqs, max_total_len}; generate {requests}; submit {requests}; abort
      {ids}; memory; ping
Out:  one answer each to load, prepare, generate, memory and ping: {"event": "done", ...}; an event "step"
      after each step of submitted requests; "error" with a message when something failed.
"""

import abc
import json
import os
import resource
import select
import sys
import time
import traceback
from collections import deque, namedtuple


class WorkerError(Exception):
    """Something that the user can mend; its text is one line. `module` names a package that is missing."""

    def __init__(self, message, module=None):
        super().__init__(message)
        self.module = module


class Request:
    """A request with what it has generated. `reason` is None while it runs."""

    def __init__(self, fields):
        # id, prompt, max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos
        vars(self).update(fields)
        self.tokens = []
        self.times = []
        self.scheduled = None
        self.reason = None


# The outcome of one step: (request, token) pairs, the requests that it took in, and counts of tokens.
Step = namedtuple("Step", "pairs admitted prefill decode padded")


class Engine(abc.ABC):
    """Base of a worker's engine: the queue, and when a request ends. A subclass has `load`, `prepare`,
    `memory` and `forward`."""

    def __init__(self):
        self.waiting: deque = deque()
        self.running: list = []
        self.eos: frozenset = frozenset()

    @abc.abstractmethod
    def forward(self):
        """Takes the step's requests in and returns a `Step`."""

    def busy(self):
        return bool(self.waiting or self.running)

    def add(self, requests):
        self.waiting.extend(requests)

    def drop(self, request):  # noqa: B027 (nothing is held)
        """A running request has ended; frees what it held."""

    def abort(self, ids):
        self.waiting = deque(r for r in self.waiting if r.id not in ids)
        for request in [r for r in self.running if r.id in ids and r.reason is None]:
            request.reason = "abort"
            self._end(request)

    def _end(self, request):
        self.running.remove(request)
        self.drop(request)

    def step(self):
        """One step; returns it with its start and the instant at which its tokens were there."""
        start = time.perf_counter()
        done = self.forward()
        now = time.perf_counter()
        for request in done.admitted:
            request.scheduled = start
        for request, token in done.pairs:
            request.tokens.append(token)
            request.times.append(now)
            if token in self.eos and not request.ignore_eos:
                request.reason = "stop"
            elif len(request.tokens) >= request.max_tokens:
                request.reason = "length"
            if request.reason is not None:
                self._end(request)
        return done, start, now


class Channel:
    """The pipes."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self.buffer = b""
        self.open = True

    def send(self, **fields):
        self.out.write(json.dumps(fields) + "\n")
        self.out.flush()

    def messages(self, block):
        """Returns the messages that have come; waits for the first one if `block`."""
        messages = []
        while self.open and (block or select.select([0], [], [], 0)[0]):
            piece = os.read(0, 1 << 16)
            self.open = bool(piece)
            *lines, self.buffer = (self.buffer + piece).split(b"\n")
            messages += [json.loads(line) for line in lines if line.strip()]
            block = block and not messages
        return messages


def peak_bytes():
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(usage if sys.platform == "darwin" else usage * 1024)


def usable_cores():
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def serve(engine):
    """Runs until stdin ends."""
    channel = Channel()
    try:
        while channel.open:
            for message in channel.messages(block=not engine.busy()):
                _handle(engine, channel, message)
            if channel.open and engine.busy():
                _step(engine, channel)
    except WorkerError as error:
        channel.send(event="error", message=str(error), module=error.module)
        sys.exit(2)
    except BrokenPipeError:
        os._exit(1)  # nobody is left to tell
    except Exception as error:
        traceback.print_exc()
        channel.send(event="error", message=f"{type(error).__name__}: {error}")
        sys.exit(1)


def _handle(engine, channel, message):
    op = message["op"]
    if op == "load":
        channel.send(event="done", **engine.load(message["options"]))
    elif op == "prepare":
        engine.prepare(message["max_num_seqs"], message["max_total_len"])
        channel.send(event="done")
    elif op == "generate":
        requests = [Request(fields) for fields in message["requests"]]
        channel.send(event="done", **_generate(engine, requests))
    elif op == "submit":
        engine.add([Request(fields) for fields in message["requests"]])
    elif op == "abort":
        engine.abort(set(message["ids"]))
    elif op == "memory":
        channel.send(event="done", **{"process_peak_bytes": peak_bytes(), **engine.memory()})
    elif op == "ping":
        channel.send(event="done", now=time.perf_counter())
    else:
        raise ValueError(f"unknown op {op!r}")


def _generate(engine, requests):
    """All to the end. `start` is when they were here: what the pipe took is none of the engine's time."""
    start = time.perf_counter()
    engine.add(requests)
    while engine.busy():
        engine.step()
    return {
        "start": start,
        "outputs": [
            {
                "id": r.id, "tokens": r.tokens, "times": r.times, "scheduled": r.scheduled, "reason": r.reason
            }
            for r in requests
        ],
    }  # fmt: skip


def _step(engine, channel):
    done, start, now = engine.step()
    channel.send(
        event="step",
        start=start,
        time=now,
        admitted=[r.id for r in done.admitted],
        tokens=[[r.id, token, r.reason] for r, token in done.pairs],
        prefill=done.prefill,
        decode=done.decode,
        padded=done.padded,
        running=len({r.id for r, _ in done.pairs} | {r.id for r in engine.running}),
        waiting=len(engine.waiting),
    )
