"""The phases: each asks something hard of an engine and returns what became of it. An engine is idle before
and after. Prompts are random tokens; all sampling is greedy and to the full length."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moejax.bench.stress.config import StressSection
from moejax.core.errors import RequestError, StepError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams

# Turns of the engine without an end after which a phase gives up on it, for each token that it asked for.
_MOST_STEPS_PER_TOKEN = 20


@dataclass
class Counts:
    """The outcomes of a phase's requests: `done` to their full length, `aborted`, `left` (streams), `failed`
    or refused, `unfinished` when the engine had nothing left to do; `tokens` were generated."""

    requests: int = 0
    done: int = 0
    aborted: int = 0
    left: int = 0
    failed: int = 0
    unfinished: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)

    def fault(self, error: str) -> None:
        self.failed += 1
        self.errors.append(error)

    def take(self, output: RequestOutput, asked: int, ended: bool) -> None:
        """Counts a request that ought to have ended; `ended`: it was aborted while it ran."""
        self.requests += 1
        self.tokens += len(output.outputs[0].token_ids)
        reason = output.outputs[0].finish_reason
        if output.error:
            self.fault(output.error)
        elif not output.finished:
            self.unfinished += 1
        elif (reason == "abort") != ended:
            self.fault("an aborted request ran on" if ended else "a request ended as aborted by nobody")
        elif ended:
            self.aborted += 1
        elif len(output.outputs[0].token_ids) != asked:
            self.fault(f"{len(output.outputs[0].token_ids)} tokens where {asked} were asked for")
        else:
            self.done += 1


@dataclass
class Load:
    """An engine under a phase."""

    llm: LLM
    section: StressSection
    rng: np.random.Generator
    counts: Counts = field(default_factory=Counts)
    live: list[tuple[RequestOutput, int]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def prompt(self, length: int) -> list[int]:
        return self.rng.integers(0, self.llm.config.vocab_size, size=max(1, length)).tolist()

    def length(self, low: float, high: float) -> int:
        """Between these shares of the longest sequence."""
        limit = self.llm.max_model_len
        return int(self.rng.integers(max(1, int(low * limit)), max(2, int(high * limit)) + 1))

    def submit(self, prompt_len: int, output_len: int) -> None:
        """Queues a request; one that cannot fit is made shorter, one that is refused is a failure."""
        output_len = max(1, min(output_len, self.llm.max_model_len - prompt_len))
        try:
            output = self.llm.submit(self.prompt(prompt_len), greedy(output_len))
        except RequestError as error:
            self.counts.requests += 1
            self.counts.fault(str(error))
            return
        self.live.append((output, output_len))

    def run(self, until: Callable[[int], bool] = lambda step: False) -> None:
        """Steps until nothing is left or `until(step)`."""
        most = _MOST_STEPS_PER_TOKEN * (1 + sum(output_len for _, output_len in self.live))
        for step in range(most):
            if until(step) or not self.llm.step():
                return
        self.counts.errors.append(f"the engine was not done after {most} steps")
        for output, _ in self.live:
            self.end(output)

    def run_down_to(self, left: int) -> None:
        """Steps until at most so many requests have not ended."""
        self.run(lambda step: self.unended() <= left)

    def end(self, output: RequestOutput) -> None:
        """Aborts a request, unless it is done."""
        if not output.finished:
            self.ended.add(output.request_id)
            self.llm.abort(output.request_id)

    def unended(self) -> int:
        return sum(not output.finished for output, _ in self.live)

    def finish(self) -> Counts:
        self.run()
        for output, output_len in self.live:
            self.counts.take(output, output_len, output.request_id in self.ended)
        self.live.clear()
        return self.counts


def greedy(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)


def long(load: Load) -> Counts:
    """Prompts of 70 to 95 % of the longest sequence: cut into chunks, few at a time."""
    for _ in range(max(1, load.section.requests // 4)):
        load.submit(load.length(0.7, 0.95), 4)
    return load.finish()


def burst(load: Load) -> Counts:
    """Bursts of twice as many requests as may run; each comes while half of the last is still there."""
    size = min(load.section.requests, 2 * load.llm.engine_config.max_num_seqs)
    sent = 0
    while sent < load.section.requests:
        for _ in range(min(size, load.section.requests - sent)):
            load.submit(load.length(0.02, 0.3), load.length(0.01, 0.1))
            sent += 1
        load.run_down_to(load.unended() // 2)
    return load.finish()


def abort(load: Load) -> Counts:
    """Requests ended at random moments: while they wait, in the middle of their prompt, while they decode."""
    for _ in range(load.section.requests):
        load.submit(load.length(0.02, 0.6), load.length(0.02, 0.2))
    chosen = [output for output, _ in load.live if load.rng.random() < load.section.abort_share]
    moments = sorted(
        zip(load.rng.integers(0, 40, size=len(chosen)).tolist(), chosen, strict=True),
        key=lambda pair: pair[0],
    )

    def end_some(step: int) -> bool:
        while moments and moments[0][0] <= step:
            load.end(moments.pop(0)[1])
        return False

    load.run(end_some)
    return load.finish()


def memory(load: Load) -> Counts:
    """As many sequences as may run, each growing to most of the longest length: more than a scarce cache has
    blocks for."""
    for _ in range(load.section.requests):
        load.submit(load.length(0.1, 0.3), load.length(0.3, 0.6))
    return load.finish()


def stream(load: Load) -> Counts:
    """Streams in turns: some read to the end, some left after a few chunks, some never read."""
    counts = load.counts
    open_streams: list[Any] = []
    for index in range(max(3, load.section.requests // 2)):
        output_len = load.length(0.03, 0.1)
        chunks = load.llm.generate_stream(load.prompt(load.length(0.02, 0.3)), greedy(output_len))
        reads = (0, int(load.rng.integers(1, max(2, output_len))), None)[index % 3]
        open_streams.append([chunks, reads, output_len, 0])
        counts.requests += 1
    while open_streams:
        for item in list(open_streams):
            chunks, reads, output_len, read = item
            if reads is not None and read >= reads:
                if read:
                    chunks.close()
                counts.left += 1
                open_streams.remove(item)
                del item, chunks  # one that was never read is dropped, not closed
                continue
            try:
                chunk = next(chunks, None)
            except StepError as error:
                counts.fault(str(error))
                open_streams.remove(item)
                continue
            if chunk is not None:
                item[3] += len(chunk.token_ids)
                counts.tokens += len(chunk.token_ids)
                continue
            open_streams.remove(item)
            if read == output_len:
                counts.done += 1
            else:
                counts.fault(f"a stream ended after {read} of {output_len} tokens")
    return load.finish()


RUN: dict[str, Callable[[Load], Counts]] = {
    "long": long, "burst": burst, "abort": abort, "memory": memory, "stream": stream,
}  # fmt: skip
