"""Prefill and decode apart (DistServe, OSDI 2024): one engine computes prompts, another goes on with them.

    decode    checks the request, whose output its caller has
    prefill   in a thread on other devices, or in a process of its own: computes the prompt, samples first
              tokens, copies its blocks to the host's memory, sends both through a socket pair
    decode    queues the samples, which find their prompt computed when they are admitted: the blocks that
              they get are filled before that step

On the host blocks have all heads and layers, so that layouts may differ freely. What a seed draws depends on
the number of tokens alone, so tokens are those of one engine. What the prefill engine fails to do, or has not
done when it is lost, the other one does from the beginning. Messages have a checksum, and every wait an end.
"""

import logging
import multiprocessing
import pickle
import queue
import signal
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from moejax.cache.store import BlockStore
from moejax.core.errors import ConfigError, DeviceError, MoejaxError, RequestError, StepError, refuse
from moejax.engine.llm import LLM
from moejax.engine.reconfigure import stages_of
from moejax.engine.requests.api import FinishReason, RequestOutput, SamplingParams
from moejax.engine.requests.builder import drawn, roots_of
from moejax.engine.requests.inputs import as_list
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.sequence import Sequence as Sample
from moejax.engine.scheduling.sequence import State, end_reason
from moejax.sharding.mesh import virtual_devices

logger = logging.getLogger(__name__)

_TURN_S = 0.02  # longest wait for a message before the caller has its turn
_START_S = 600.0  # longest wait for the model to be open, and for steps to be compiled


class Disaggregated:
    """A model behind two engines, to be used from one thread. What it has not of its own is `decode`'s.

    Args:
        prefill: an `LLM` that serves nothing else, on devices of its own (`ParallelConfig.first_device`); or
            arguments of one to open in another process, started by `multiprocessing`: a script needs
            `if __name__ == "__main__":`, and GPUs need XLA_PYTHON_CLIENT_PREALLOCATE=false.
        decode: an engine of the same model. What wants all of the prompt (penalties, `prompt_logprobs`) is
            its alone. At most twice as many requests as it can run are under way; others wait in order of
            arrival, so that the host holds no more blocks than theirs.
        timeout_s: the longest silence of a prefill engine that is at work: more than a step takes.

    Attributes:
        lost: why there is no prefill engine any more, until `start`; None while there is.
        counts: requests `handed_over`, with `blocks` and `bytes`; `decode_only`; `recomputed`, which the
            prefill engine has failed; `lost_peers`.

    Raises:
        ConfigError: an engine cannot do it, or they differ in more than their layout.
        DeviceError: the process does not start.
    """

    def __init__(self, prefill: LLM | Mapping[str, Any], decode: LLM, *, timeout_s: float = 60.0) -> None:
        self.decode, self._given, self._timeout_s = decode, prefill, timeout_s
        self._blocks = prepare(decode, saving=False)
        self._most = 2 * decode.engine_config.max_num_seqs * decode.parallel_config.data_groups
        self.counts: Counter[str] = Counter()
        self._live: dict[str, RequestState] = {}
        self._queued: dict[str, RequestState] = {}
        self._away: dict[str, RequestState] = {}
        self.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decode, name)

    def start(self) -> None:
        """Starts the prefill engine, anew after it was lost, and waits until it is there."""
        self.lost: str | None = None
        self._heard = 0.0
        self._end, theirs = multiprocessing.Pipe()
        limit_waits(self._end, self._timeout_s)
        here, processes = isinstance(self._given, LLM), multiprocessing.get_context("spawn")
        make: Any = threading.Thread if here else processes.Process
        given = theirs, self._timeout_s, self._given, jax.local_device_count()
        self._peer = make(target=serve, args=given, daemon=True)
        self._peer.start()
        if not here:
            theirs.close()  # the copy there tells when it is gone
        blocks = self._answer()
        if self.lost is not None:
            raise DeviceError(self.lost)
        if blocks != self._blocks:
            self.close()
            raise ConfigError(
                "disaggregate: the engines' models or blocks differ; give both the same model, dtypes, "
                "quantization, seed, engine.block_size and kernels, and with engine.deterministic=tiles the "
                "same layout and tile_tokens"
            )

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list[RequestOutput]:
        """Completes each prompt, see `LLM.generate`; routing is recorded of the steps that decode."""
        options["record"] = options.pop("record_routing", False)
        outputs = self._submit(self.decode.builder.to_generate(as_list(prompts), sampling_params, **options))
        try:
            while not all(output.finished for output in outputs):
                if self.decode.engine.stopped is not None:
                    raise RequestError(self.decode.engine.stopped)
                self.step()
        finally:
            for output in outputs:
                self.abort(output.request_id)
        if failed := next((output.error for output in outputs if output.error), None):
            raise StepError(failed, outputs)
        return outputs

    def submit(self, prompt: Any, sampling_params: Any = None, **options: Any) -> RequestOutput:
        """Queues a request and returns its output, see `LLM.submit`."""
        options["arrival"] = options.pop("arrival_time", None)
        return self._submit(self.decode.builder.to_generate([prompt], sampling_params, **options))[0]

    def step(self) -> bool:
        """Takes in prompts that are there, waiting where nothing decodes, and runs a step. False if there was
        nothing to do."""
        for number, request in [*self._live.items()]:
            limit, since = request.sequences[0].params.max_time_s, request.output.metrics.arrival_time
            if limit is not None and time.perf_counter() >= since + limit:
                self.abort(number, "time")
        scheduler = self.decode.engine.scheduler
        while self._queued and len(self._away) + scheduler.num_waiting < self._most:
            self._hand_out(next(iter(self._queued)))
        while self._away and self._hear(_TURN_S if scheduler.idle else 0)[0] in ("done", "beat"):
            pass
        if self._away and time.monotonic() - self._heard > self._timeout_s:
            self._lose(f"it said nothing for {self._timeout_s:g} s")
        return bool(self.decode.step() or self._away or self._queued)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request with what it has; nothing happens to one that has ended."""
        if (request := self._live.get(request_id)) is None:
            return
        if self._queued.pop(request_id, away := self._away.pop(request_id, None)) is None:
            self.decode.engine.abort(request, reason)
        else:
            request.abort(reason)
        if away is not None:
            self._tell("abort", request_id)

    def warmup(self, *, max_total_len: int, sampling_params: Sequence[SamplingParams], **more: Any) -> None:
        """Compiles ahead of time every step of both engines, see `LLM.warmup`."""
        self.decode.warmup(max_total_len=max_total_len, sampling_params=sampling_params, **more)
        firsts = [first_token(drawn(params)) for params in sampling_params]
        self._call("warmup", max_total_len=max_total_len, sampling_params=firsts)

    def clear_prefix_cache(self) -> None:
        """Forgets prefixes in both engines, see `LLM.clear_prefix_cache`."""
        self.decode.clear_prefix_cache()
        self._call("clear_prefix_cache")

    def close(self) -> None:
        """Ends both engines, see `LLM.close`."""
        self._stop()
        self._peer.join(self._timeout_s)
        self.decode.close()

    # -- requests ----------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[RequestState]) -> list[RequestOutput]:
        for root in (root for request in requests for root in request.roots):
            self.decode.engine.scheduler.check_fits(root)
            self.decode.engine.scheduler.check_on_time(root)
        for request in requests:
            number = request.output.request_id
            self._live[number], request.on_close = request, partial(self._live.__delitem__, number)
            if request.sequences[0].not_looked_up is None:
                self._queued[number] = request
            else:
                self._queue(request, "decode_only")
        return [request.output for request in requests]

    def _hand_out(self, number: str) -> None:
        request = self._queued.pop(number)
        if self.lost is not None:
            return self._queue(request, "recomputed")
        first, output = request.sequences[0], request.output
        asked = output.prompt_token_ids, first_token(first.params, first.seed)
        more = {"arrival_time": output.metrics.arrival_time, "options": first.options}
        self._heard = self._heard if self._away else time.monotonic()
        self._away[number] = request
        self._tell("submit", number, asked, more)

    def _take(self, request: RequestState, told: RequestOutput | str, arrays: list[np.ndarray]) -> None:
        """Goes on with what the prefill engine has computed."""
        if isinstance(told, str):
            logger.warning("request %s is computed anew: %s", request.output.request_id, told)
            return self._queue(request, "recomputed")
        metrics, most, now = request.output.metrics, request.roots[0].samples, self.decode.engine.clock()
        metrics.scheduled_time = told.metrics.scheduled_time
        metrics.cached_tokens = told.metrics.cached_tokens
        for sample, first in zip(request.sequences, told.outputs, strict=True):
            sample.forks, (token,) = [], first.token_ids
            sample.tokens.append(token)
            sample.imported, sample.blocks_of_host = sample.prompt_len, arrays
            logprob = first.logprobs[0] if first.logprobs else None
            ended = request.take(first.index, token, logprob, end_reason(sample), now)
            sample.state = State.FINISHED if ended else State.WAITING
        request.attach(roots_of(request.sequences, most))
        request.roots = [root for root in request.roots if root.state is State.WAITING]
        self.counts.update(blocks=len(arrays[0]), bytes=sum(array.nbytes for array in arrays))
        self._queue(request, "handed_over")
        request.close()  # if all have ended

    def _queue(self, request: RequestState, why: str) -> None:
        self.counts[why] += 1
        for root in request.roots:
            self.decode.engine.scheduler.add(root)

    # -- messages ----------------------------------------------------------------------------------------

    def _call(self, name: str, **options: Any) -> None:
        """Has the prefill engine's `LLM` do something, and waits for it."""
        self._tell("call", name, options)
        self._answer()

    def _tell(self, *message: Any) -> None:
        if self.lost is None and not send(self._end, *message):
            self._lose("it takes no message")

    def _hear(self, timeout_s: float) -> tuple[Any, ...]:
        """Takes in the next message, ("nothing",) if there is none in time."""
        message = receive(self._end, timeout_s) if self.lost is None else ("nothing",)
        if message[0] == "lost":
            self._lose(message[1])
        elif message[0] != "nothing":
            self._heard = time.monotonic()
        if message[0] == "done" and (request := self._away.pop(message[1], None)) is not None:
            self._take(request, *message[2:])  # else it was ended meanwhile
        return message

    def _answer(self) -> Any:
        """Waits for what is said once the model is open, or a call has returned."""
        until = time.monotonic() + _START_S
        while (message := self._hear(max(0.0, until - time.monotonic())))[0] in ("done", "beat"):
            pass
        if message[0] == "refused":
            self._stop()
            raise ConfigError(message[1])
        if message[0] == "nothing" and self.lost is None:
            self._lose(f"it is not ready after {_START_S:g} s")
        return message[-1]

    def _lose(self, why: str) -> None:
        """Ends the prefill engine; what it has is computed here."""
        code = self._stop()
        self.lost = f"the prefill engine is lost: {why}" + (f" (exit code {code})" if code else "")
        self.counts["lost_peers"] += 1
        logger.warning("%s; requests go on without it", self.lost)
        away, self._away = self._away, {}
        for request in away.values():
            self._queue(request, "recomputed")

    def _stop(self) -> int | None:
        """Closes the connection, at which a thread ends, and kills a process, whose exit code it returns."""
        self._end.close()
        if isinstance(self._given, LLM):
            return None
        self._peer.join(0.2)  # its own end says more than ours
        code: int | None = self._peer.exitcode
        self._peer.kill()
        self._peer.join()
        return code


def first_token(params: SamplingParams, seed: int | None = None) -> SamplingParams:
    """Returns what samples the first tokens of a request with `params`, whose text is not asked for."""
    least = min(1, params.min_tokens)
    params = replace(params, seed=seed, max_tokens=1, min_tokens=least, max_time_s=None, stop=())
    return replace(params, detokenize=False)


def prepare(llm: LLM, saving: bool) -> tuple[Any, ...]:
    """Compiles what copies an engine's blocks to the host (`saving`), or from there.

    Returns:
        What two engines must have in common: the model's digest, shape and dtype of a block's arrays, and
        layout and tile where bits are theirs (`engine.deterministic=tiles`).

    Raises:
        ConfigError: one line says why its requests cannot go on in another engine.
    """
    engine, resolved, builder, runner = llm.engine_config, llm._resolved, llm.builder, llm.runner
    refusals = {
        "several processes of one program": jax.process_count() > 1,
        "an engine without weights (fill=False)": llm._weights.absent,
        "engine.batching=static": engine.batching == "static",
        "engine.experts.resident": llm._weights.tiers is not None,
        "engine.adapters.slots": engine.adapters.slots,
        "engine.capture_routing or a replayed trace": engine.capture_routing or builder.replay is not None,
        f"engine.speculation.method={engine.speculation.method}": resolved.draft is not None,
        "engine.speculation.acceptance=rejection": builder.rejection,
        "engine.deterministic=verified, which guesses": engine.deterministic == "verified",
        "limited capacity or routing by batch": builder.limited,
        "engine.kv_policy, which gives up blocks": engine.kv_policy.method != "none",
        "blocks that windows leave behind; set engine.window_cache=full": resolved.window is not None,
        "linear attention, whose states are no blocks": any(resolved.config.linear_layers),
    }
    refuse("disaggregate", True, refusals)
    warmed_up, llm.ledger.warmed_up = llm.ledger.warmed_up, False  # it is no defect
    for z in range(len(runner.buckets.segments.sizes)):
        runner._mover(z, saving=saving)
    llm.ledger.warmed_up = warmed_up
    arrays = [x for stage in stages_of(runner) for x in jax.tree.leaves(stage.pool.blocks(1))]
    bits = None
    if engine.deterministic == "tiles":
        bits = replace(llm.parallel_config, first_device=0), engine.tile_tokens
    return builder.model, [(x.shape[1:], str(x.dtype)) for x in arrays], bits


# -- the prefill engine's side ---------------------------------------------------------------------------


def serve(end: Connection, timeout_s: float, given: LLM | Mapping[str, Any], devices: int) -> None:
    """Runs a prefill engine for whoever is at the other end of a pair, until that goes. `devices` are the
    virtual ones there. Between steps it says that it is there."""
    with end:
        limit_waits(end, timeout_s)
        try:
            if not isinstance(given, LLM):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one
                virtual_devices(devices)
                given = LLM(**given)
            blocks = prepare(given, saving=True)
        except MoejaxError as error:
            send(end, "refused", str(error))
            return
        send(end, "ready", blocks)
        with given:
            answer(end, given, min(1.0, timeout_s / 4))


def answer(end: Connection, llm: LLM, beat_s: float) -> None:
    """Does what messages ask until the other end is gone, and steps where there is none."""
    live, said = dict[str, tuple[RequestOutput, list[BlockStore]]](), 0.0
    inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(end, inbox), daemon=True).start()
    while True:
        match inbox.get() if inbox.qsize() or not live else ("nothing",):
            case ("submit", number, asked, more):
                try:
                    live[number] = llm.submit(*asked, **more), []
                except RequestError as error:
                    send(end, "done", number, str(error), [])
                    continue
                output, stores = live[number]
                sample = llm._submitted[output.request_id].sequences[0]
                sample.on_release = partial(copy_blocks, llm, stores)
            case ("abort", number):
                if number in live:
                    llm.abort(live[number][0].request_id)
            case ("call", name, options):
                getattr(llm, name)(**options)
                send(end, "ready", None)
            case ("lost", _):
                return
            case _:
                llm.step()
                for number in [number for number, (output, _) in live.items() if output.finished]:
                    output, stores = live.pop(number)
                    arrays = [array for store in stores for array in store.get(range(store.slots))]
                    failed = output.error or (not arrays and "it ended before its first token")
                    send(end, "done", number, failed or output, arrays)
                if time.monotonic() - said > beat_s:
                    said = time.monotonic()
                    send(end, "beat")


def listen(end: Connection, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Takes in messages during steps and sending, so that the other end waits for neither to send its own."""
    message: tuple[Any, ...] = ()
    while message[:1] != ("lost",):
        inbox.put(message := receive(end, None))


def copy_blocks(llm: LLM, stores: list[BlockStore], sample: Sample) -> None:
    """Starts to copy blocks that are about to be released, before a later step can write there."""
    blocks = np.array(sample.blocks)
    for stage in stages_of(llm.runner) if sample.finish_reason else ():  # else it is preempted
        stores.append(BlockStore(len(blocks)))
        groups = np.full_like(blocks, sample.group)
        stage.transport(True, stores[-1], groups, blocks, np.arange(len(blocks)))


def limit_waits(end: Connection, timeout_s: float) -> None:
    """Has every wait within a message end after so many seconds."""
    same, limit = socket.socket(fileno=end.fileno()), struct.pack("ll", int(timeout_s), 1)
    for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        same.setsockopt(socket.SOL_SOCKET, way, limit)
    same.detach()


def send(end: Connection, *message: Any) -> bool:
    """Sends a message, and tells whether it was taken."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    try:
        end.send_bytes(zlib.crc32(data).to_bytes(4) + data)
    except OSError:
        return False
    return True


def receive(end: Connection, timeout_s: float | None) -> tuple[Any, ...]:
    """Returns the next message: ("nothing",) if none begins in time, ("lost", why) if none can be read."""
    try:
        if not end.poll(timeout_s):
            return ("nothing",)
        data = memoryview(end.recv_bytes())
    except (EOFError, OSError):
        return "lost", "its connection has ended"
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4]):
        return "lost", "what it sent has another checksum"
    return pickle.loads(data[4:])
