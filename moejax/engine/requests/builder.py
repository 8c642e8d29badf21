"""From prompts and parameters to requests that the engine can queue."""

import itertools
import time
from collections.abc import Sequence

from moejax.cache.allocator import BlockAllocator
from moejax.engine.requests.api import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.requests.inputs import Prompt, PromptReader, params_list
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.sequence import Sequence as Sample
from moejax.engine.step.sampler import SamplerMode, sampler_mode


class RequestBuilder:
    """Numbers requests and sequences in the order in which they are built.

    Args:
        reader: checks prompts.
        eos_token_ids: what ends a sample unless its parameters ignore it.
        seed: the engine's, from which requests without one of their own draw theirs.
        max_num_seqs: samples that run at a time.
        whole_in: the cache, where each sample's blocks are all set aside at once (static batching).
        replay: what gives each request its recorded routing, None where routers choose.
    """

    def __init__(
        self,
        reader: PromptReader,
        eos_token_ids: tuple[int, ...],
        seed: int,
        max_num_seqs: int,
        whole_in: BlockAllocator | None,
        replay: RoutingReplay | None = None,
    ) -> None:
        self._reader = reader
        self.eos_token_ids = eos_token_ids
        self._seed = seed
        self._max_num_seqs = max_num_seqs
        self._whole_in = whole_in
        self.replay = replay
        self._ids = itertools.count()
        self._orders = itertools.count()

    def to_generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streams: bool = False,
        record: bool = False,
        arrival: float | None = None,
    ) -> list[RequestState]:
        """Checked requests, not queued yet; each prompt with its parameters.

        Args:
            streams: keep what each step adds.
            record: record the routing of their steps.
            arrival: `time.perf_counter()` seconds; None: now.

        Raises:
            RequestError: see `LLM.generate`.
        """
        every = params_list(sampling_params, len(prompts))
        arrival = time.perf_counter() if arrival is None else arrival
        requests = []
        for i, (prompt, params) in enumerate(zip(prompts, every, strict=True)):
            text, ids = self._reader.to_generate(prompt, params, f"prompt {i}")
            max_tokens = min(params.max_tokens, self._reader.max_model_len - len(ids))
            builders = [
                OutputProcessor(n, params, self._reader.tokenizer, self.eos_token_ids, max_tokens)
                for n in range(params.n)
            ]
            number = next(self._ids)
            output = RequestOutput(
                str(number), text, ids, [builder.output for builder in builders], RequestMetrics(arrival)
            )
            # The request's place in the call seeds it, so that it draws the same whatever runs beside it.
            seed = params.seed if params.seed is not None else (self._seed * 1_000_003 + i * 1_009) % 2**32
            request = RequestState(output, builders, streams=streams)
            request.attach(self._samples(ids, params, seed, max_tokens, record))
            requests.append(request)
        if self.replay is not None:
            self.replay.assign(requests)
        return requests

    def _samples(
        self, ids: list[int], params: SamplingParams, seed: int, max_tokens: int, record: bool
    ) -> list[Sample]:
        """A request's sequences; more than fit the batch at a time come as several groups."""
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.eos_token_ids)
        )
        mode = self.mode(params)
        samples = [
            Sample(
                tokens=list(ids),
                prompt_len=len(ids),
                params=params,
                max_length=len(ids) + max_tokens,
                order=next(self._orders),
                seed=seed + n,
                stop_ids=stop_ids,
                record=record,
                mode=mode,
            )
            for n in range(params.n)
        ]
        group = self._max_num_seqs
        if self._whole_in is not None:
            each = self._whole_in.blocks_for(len(ids) + max_tokens - 1)
            group = min(group, max(1, self._whole_in.num_blocks // each))
        roots = samples[::group]
        for i, root in enumerate(roots):
            root.forks = samples[i * group + 1 : (i + 1) * group]
        return roots

    def to_score(self, every: Sequence[list[int]]) -> list[RequestState]:
        """Requests for the log-probabilities of checked prompts.

        Raises:
            RequestError: a prompt is not in the trace that is replayed.
        """
        requests = [self._to_score(ids) for ids in every]
        if self.replay is not None:
            self.replay.assign(requests, "sequence")
        return requests

    def _to_score(self, ids: list[int]) -> RequestState:
        output = RequestOutput(str(next(self._ids)), None, ids, [], RequestMetrics(time.perf_counter()))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        sample = Sample(
            list(ids), len(ids), params, len(ids), next(self._orders), score=True, mode=self.mode(params)
        )
        request = RequestState(output, [])
        request.attach([sample])
        return request

    def mode(self, params: SamplingParams) -> SamplerMode:
        """Log-probabilities are computed for a few sizes only, since each is a program of its own."""
        mode = sampler_mode([params], self._reader.vocab_size)
        sizes = (-1, 0, 1, 5, 20, 100, self._reader.vocab_size)
        return mode._replace(
            logprobs=min(next(n for n in sizes if n >= mode.logprobs), self._reader.vocab_size)
        )
