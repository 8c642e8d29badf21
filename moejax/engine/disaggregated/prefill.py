"""The engine of prompts: it computes them, samples first tokens, and gives away the blocks. What it must have
for that, and the engine that decodes, is checked here."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.cache.store import BlockStore
from moejax.core.errors import ConfigError, MoejaxError, RequestError, refuse
from moejax.engine.llm import LLM
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.reconfigure import stages_of
from moejax.engine.requests.api import Logprob, RequestOptions, SamplingParams
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.sequence import Sequence


class PeerLost(MoejaxError, RuntimeError):
    """The process of the engine of prompts is gone, hangs, or has sent what is damaged."""


class Asked(NamedTuple):
    """A prompt to compute, with the parameters of `first_token`; `arrival` in `time.perf_counter()` seconds."""

    number: str
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions
    arrival: float


class Prefilled(NamedTuple):
    """What became of a prompt.

    Attributes:
        tokens, logprobs: the first of each sample; None where no log-probability is asked for.
        arrays: its blocks, see `Sequence.blocks_of_host`.
        scheduled, cached: as `RequestMetrics` has them.
        error: why there is nothing of all that.
    """

    number: str
    tokens: list[int]
    logprobs: list[Logprob | None]
    arrays: list[np.ndarray]
    scheduled: float | None = None
    cached: int = 0
    error: str | None = None


def first_token(params: SamplingParams, seed: int | None = None) -> SamplingParams:
    """Returns what samples the first token that a request with `params` gets. Its text is left to whoever
    decodes."""
    return dataclasses.replace(
        params, seed=seed, max_tokens=1, min_tokens=min(1, params.min_tokens), max_time_s=None, stop=(),
        detokenize=False,
    )  # fmt: skip


class Blocks(NamedTuple):
    """What two engines must have in common: the model by its digest, and of each array of each layer's
    segments a block's shape and dtype."""

    model: str
    arrays: list[tuple[tuple[int, ...], str]]

    @property
    def nbytes(self) -> int:
        """Bytes of a block, with all heads and layers."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.arrays)

    def check(self, other: "Blocks") -> None:
        """Raises `ConfigError` unless another engine has the same."""
        if self.model != other.model:
            raise ConfigError(
                "disaggregate: the engine of prompts has another model (configuration, quantization, cache "
                "dtype or seed of random weights) than the one that decodes; open both alike"
            )
        if self.arrays != other.arrays:
            mine, theirs = next(p for p in zip(self.arrays, other.arrays, strict=True) if p[0] != p[1])
            raise ConfigError(
                f"disaggregate: blocks of {theirs[0]} {theirs[1]} do not fit blocks of {mine[0]} {mine[1]}; "
                "give both engines the same engine.block_size and kernels"
            )


def prepare(llm: LLM, saving: bool) -> Blocks:
    """Checks that an engine can give its blocks away (`saving`), or take others', and compiles that.

    Raises:
        ConfigError: one line says what keeps it from that.
    """
    engine, resolved, builder = llm.engine_config, llm._resolved, llm.builder
    refusals = {
        "several processes of one program": jax.process_count() > 1,
        "an engine without weights (fill=False)": llm._weights.absent,
        "engine.batching=static": engine.batching == "static",
        "engine.experts.resident": llm._weights.tiers is not None,
        "engine.initial_blocks": engine.initial_blocks is not None,
        "engine.adapters.slots": engine.adapters.slots,
        "engine.capture_routing or a replayed trace": engine.capture_routing or builder.replay is not None,
        "engine.speculation.method=draft, whose model has blocks of its own": resolved.draft is not None,
        "engine.speculation.acceptance=rejection": builder.rejection,
        "engine.deterministic, whose bits are one layout's": engine.deterministic != "none",
        "limited capacity or routing by batch, which depend on what else is in a step": builder.limited,
        "engine.kv_policy, which gives up blocks": engine.kv_policy.method != "none",
        "blocks that a sliding window leaves behind; set engine.window_cache=full": resolved.window is not None,
        "linear attention, whose states are no blocks": any(resolved.config.linear_layers),
    }
    refuse("disaggregate", True, refusals)
    runner, found = llm.runner, list[tuple[tuple[int, ...], str]]()
    warmed_up, llm.ledger.warmed_up = llm.ledger.warmed_up, False  # it is no defect
    for z in range(len(runner.buckets.segments.sizes)):
        runner._mover(z, saving=saving)
    llm.ledger.warmed_up = warmed_up
    for stage in stages_of(runner):
        found += [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(stage.pool.blocks(1))]
    return Blocks(builder.model, found)


class Prefill:
    """An engine of prompts in this process.

    Args:
        llm: serves nothing else meanwhile.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.blocks = llm, prepare(llm, saving=True)
        self._live: dict[str, RequestState] = {}
        self._stores: dict[str, list[BlockStore]] = {}
        self._ended: dict[str, str | None] = {}  # with what was wrong before they began

    def submit(self, asked: Asked) -> None:
        """Queues a prompt; what cannot be served `poll` tells."""
        try:
            (request,) = self.llm.builder.to_generate(
                [asked.prompt], asked.params, arrival=asked.arrival, options=asked.options
            )
            request.roots[0].on_release = partial(self._read, asked.number)
            request.on_close = lambda: self._ended.setdefault(asked.number)
            self.llm.engine.add([request])
            self._live[asked.number] = request
        except RequestError as error:
            self._ended[asked.number] = str(error)

    def abort(self, number: str) -> None:
        """Ends a prompt; nothing happens to one that has ended."""
        if (request := self._live.get(number)) is not None:
            self.llm.engine.abort(request)

    @property
    def busy(self) -> bool:
        return bool(self._live or self._ended)

    def poll(self, wait: bool) -> list[Prefilled]:
        """Moves prompts on, and returns those whose blocks are in the host's memory. Unless it is to `wait`,
        it does nothing while the device is at work."""
        engine = self.llm.engine
        if wait or engine.ready or isinstance(self.llm.runner, PipelineRunner):  # whose stages wait for calls
            engine.step()
        force = wait and engine.scheduler.idle
        there = [
            number
            for number in self._ended
            if force or all(store.arrived for store in self._stores.get(number, ()))
        ]
        return [self._done(number) for number in there]

    def _read(self, number: str, sequence: Sequence) -> None:
        """Starts to copy what is about to be released, before any later step can write there."""
        if sequence.finish_reason is None:
            return  # preempted, or ended from outside
        blocks = np.array(sequence.blocks)
        groups, slots = np.full_like(blocks, sequence.group), np.arange(len(blocks))
        stores = self._stores[number] = []
        for stage in stages_of(self.llm.runner):
            stores.append(BlockStore(len(blocks)))
            stage.transport(True, stores[-1], groups, blocks, slots)

    def _done(self, number: str) -> Prefilled:
        error, stores = self._ended.pop(number), self._stores.pop(number, [])
        if (request := self._live.pop(number, None)) is None:
            return Prefilled(number, [], [], [], error=error)
        output, metrics = request.output, request.output.metrics
        if output.error or not stores or not all(sample.token_ids for sample in output.outputs):
            return Prefilled(number, [], [], [], error=output.error or "it was ended before its first token")
        arrays = [array for store in stores for array in store.get(range(store.slots))]
        tokens = [sample.token_ids[0] for sample in output.outputs]
        logprobs = [sample.logprobs[0] if sample.logprobs else None for sample in output.outputs]
        return Prefilled(number, tokens, logprobs, arrays, metrics.scheduled_time, metrics.cached_tokens)

    def warmup(self, max_total_len: int, sampling_params: list[SamplingParams]) -> None:
        """Compiles all steps, see `LLM.warmup`."""
        self.llm.warmup(max_total_len=max_total_len, sampling_params=sampling_params)

    def forget(self) -> None:
        """Forgets prefixes."""
        self.llm.clear_prefix_cache()

    def close(self) -> None:
        self.llm.close()


def as_json(asked: Asked) -> dict[str, Any]:
    """Returns a prompt as `from_json` takes it."""
    fields = asked._asdict()
    return fields | {"params": dataclasses.asdict(asked.params), "options": vars(asked.options)}


def from_json(fields: dict[str, Any]) -> Asked:
    """Returns the prompt that `as_json` has written."""
    params, options = SamplingParams(**fields["params"]), RequestOptions(**fields["options"])
    return Asked(**fields | {"params": params, "options": options})
