"""Prefill and decode apart (DistServe, OSDI 2024; Splitwise, ISCA 2024): one engine computes prompts, on
devices or in a process of its own, and another goes on with them.

    decode    checks the request; its caller has its output
    prefill   computes the prompt and samples first tokens; its blocks → the host's memory
    decode    takes the tokens and queues the samples, which find the whole prompt computed when they are
              admitted: the blocks that they get are filled before that step

In the host's memory blocks have all heads and layers, so that the two layouts may differ freely. What a seed
draws depends on the number of tokens alone, so tokens are those of one engine. What the prefill engine cannot
do, or has not done when it is lost, the other one does from the beginning.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moejax.core.errors import StepError
from moejax.engine.disaggregated.prefill import Asked, PeerLost, Prefill, Prefilled, first_token, prepare
from moejax.engine.disaggregated.process import PrefillProcess
from moejax.engine.llm import LLM
from moejax.engine.requests.api import FinishReason, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.builder import drawn, roots_of
from moejax.engine.requests.inputs import Prompt, as_list
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.sequence import State, end_reason

logger = logging.getLogger(__name__)


class Disaggregated:
    """A model behind two engines, to be used from one thread.

    Args:
        prefill: computes prompts: an engine on other devices (`ParallelConfig.first_device`), or in another
            process. It serves nothing else.
        decode: an engine of the same model, which goes on with them.

    Requests with penalties or `prompt_logprobs`, which want all of the prompt, are `decode`'s alone. Of all
    others so many are under way at a time that `decode` can run twice as many; the rest wait in order of
    arrival, so that the host holds no more blocks than that.

    Attributes:
        lost: why `prefill` is of no use any more; None while it is. `restart` starts it again.
        counts: requests `handed_over`, with `blocks` and `bytes`; `decoder_only`; `recomputed`, which
            `prefill` has failed; `lost_peers`.

    Raises:
        ConfigError: an engine cannot do it, or they differ in more than their layout.
    """

    def __init__(self, prefill: LLM | PrefillProcess, decode: LLM) -> None:
        blocks = prepare(decode, saving=False)
        self.decode = decode
        self.prefill = Prefill(prefill) if isinstance(prefill, LLM) else prefill
        blocks.check(self.prefill.blocks)
        self.lost: str | None = None
        self.counts: Counter[str] = Counter()
        self._most = 2 * decode.engine_config.max_num_seqs * decode.parallel_config.data_groups
        self._live: dict[str, RequestState] = {}
        self._queued: dict[str, RequestState] = {}
        self._away: dict[str, RequestState] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt, see `LLM.generate`."""
        requests = self.decode.builder.to_generate(as_list(prompts), sampling_params, options=options)
        outputs = [request.output for request in requests]
        try:
            self._submit(requests)
            while not all(output.finished for output in outputs):
                self.step()
        finally:
            for output in outputs:
                self.abort(output.request_id)
        if failed := next((output.error for output in outputs if output.error), None):
            raise StepError(failed, outputs)
        return outputs

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """Queues a request and returns its output, see `LLM.submit`."""
        build = self.decode.builder.to_generate
        requests = build([prompt], sampling_params, arrival=arrival_time, options=options)
        self._submit(requests)
        return requests[0].output

    def step(self) -> bool:
        """Moves both engines on; waits for prompts only where nothing decodes. False if there was nothing to
        do."""
        for number, request in [*self._queued.items(), *self._away.items()]:
            limit, arrival = request.sequences[0].params.max_time_s, request.output.metrics.arrival_time
            if limit is not None and time.perf_counter() >= arrival + limit:
                self.abort(number, "time")
        engine, done = self.decode.engine, list[Prefilled]()
        while self._queued and len(self._away) + engine.scheduler.num_waiting < self._most:
            number = next(iter(self._queued))
            self._send(number, self._queued.pop(number))
        if self._away:
            done = self._of_peer(partial(self.prefill.poll, engine.scheduler.idle)) or []
        for each in done:
            if (request := self._away.pop(each.number, None)) is not None:  # else it was ended
                self._take(request, each)
        return bool(self.decode.step() or self._away or self._queued)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request with what it has; nothing happens to one that has ended."""
        request = self._live.get(request_id)
        if request is None:
            return
        if self._queued.pop(request_id, None) is not None:
            request.abort(reason)
        elif self._away.pop(request_id, None) is not None:
            request.abort(reason)
            self._of_peer(partial(self.prefill.abort, request_id))
        else:
            self.decode.engine.abort(request, reason)

    def restart(self) -> None:
        """Starts a lost prefill process again, and returns once it is there.

        Raises:
            PeerLost: it does not start.
        """
        assert isinstance(self.prefill, PrefillProcess)
        self.prefill.start()
        self.lost = None

    def warmup(self, *, max_total_len: int, sampling_params: Sequence[SamplingParams]) -> None:
        """Compiles ahead of time every step of both engines, see `LLM.warmup`."""
        self.decode.warmup(max_total_len=max_total_len, sampling_params=sampling_params)
        firsts = [first_token(drawn(params)) for params in sampling_params]
        self._of_peer(partial(self.prefill.warmup, max_total_len, firsts))

    def forget(self) -> None:
        """Forgets prefixes and drafts, on both sides."""
        self.decode.clear_prefix_cache()
        self.decode.clear_drafts()
        self._of_peer(self.prefill.forget)

    def stats(self) -> dict[str, Any]:
        """Returns those of the engine that decodes, and `counts` as `disaggregated`."""
        return self.decode.stats() | {"disaggregated": dict(self.counts)}

    def close(self) -> None:
        """Ends both engines, see `LLM.close`."""
        self.prefill.close()
        self.decode.close()

    def _submit(self, requests: Sequence[RequestState]) -> None:
        self.decode.engine.check(requests)
        for request in requests:
            number = request.output.request_id
            self._live[number] = request
            request.on_close = partial(self._live.pop, number, None)
            if request.sequences[0].not_looked_up is not None:
                self._alone(request, "decoder_only")
            else:
                self._queued[number] = request

    def _send(self, number: str, request: RequestState) -> None:
        if self.lost is not None:
            self._alone(request, "recomputed")
            return
        first, output, self._away[number] = request.sequences[0], request.output, request
        params, arrival = first_token(first.params, first.seed), output.metrics.arrival_time
        asked = Asked(number, output.prompt_token_ids, params, first.options, arrival)
        self._of_peer(partial(self.prefill.submit, asked))

    def _of_peer(self, call: Callable[[], Any]) -> Any:
        """Calls the prefill engine. If that is lost, all that it has is computed here."""
        try:
            return call() if self.lost is None else None
        except PeerLost as error:
            self.lost = str(error)
            self.counts["lost_peers"] += 1
            logger.warning("the prefill engine is lost, and requests go on without it: %s", error)
            while self._away:
                self._alone(self._away.pop(next(iter(self._away))), "recomputed")
            return None

    def _alone(self, request: RequestState, why: str) -> None:
        """Has the engine that decodes compute all of a request."""
        self.counts[why] += 1
        self.decode.engine.queue([request])

    def _take(self, request: RequestState, done: Prefilled) -> None:
        """Goes on with what the prefill engine has computed."""
        if done.error is not None:
            logger.warning("request %s is computed anew: %s", done.number, done.error)
            self._alone(request, "recomputed")
            return
        metrics, most, now = request.output.metrics, request.roots[0].samples, self.decode.engine.clock()
        metrics.scheduled_time, metrics.cached_tokens = done.scheduled, done.cached
        firsts = zip(request.sequences, done.tokens, done.logprobs, strict=True)
        for index, (sequence, token, logprob) in enumerate(firsts):
            sequence.forks = []
            sequence.tokens.append(token)
            sequence.imported, sequence.blocks_of_host = sequence.prompt_len, done.arrays
            ended = request.take(index, token, logprob, end_reason(sequence), now)
            sequence.state = State.FINISHED if ended else State.WAITING
        request.attach(roots_of(request.sequences, most))
        request.roots = [root for root in request.roots if root.state is State.WAITING]
        self.counts["handed_over"] += 1
        self.counts["blocks"] += len(done.arrays[0])
        self.counts["bytes"] += sum(array.nbytes for array in done.arrays)
        if request.roots:
            self.decode.engine.queue([request])
        else:
            request.close()
