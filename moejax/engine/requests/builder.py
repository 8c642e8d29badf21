"""From prompts and parameters to requests that the engine can queue."""

import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Sequence as Items

from moejax.cache.allocator import BlockAllocator
from moejax.core.errors import RequestError, unknown
from moejax.engine.adapters import Adapters, LoadedAdapter
from moejax.engine.grammar import Constraints
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.requests.api import (
    Checkpoint,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from moejax.engine.requests.inputs import Prompt, flat_ids, one_each
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.sequence import Bias, Sequence, State, end_reason
from moejax.engine.step.limits import CacheSpec
from moejax.engine.step.sampler import SamplerMode, sampler_mode


class RequestBuilder:
    """Turns prompts into checked requests, numbered in the order in which they are built.

    Args:
        resolved: the model, its tokenizer, and the engine's seed and limits.
        cache: of which each sample's blocks are all set aside at once under static batching.
        replay: what gives each request its recorded routing, None where routers choose.
        adapters: those that requests can name.

    `model` is a digest of what the model is: configuration, dtypes, quantization, the seed of random weights;
    it does not look at the values in a checkpoint's files.
    """

    def __init__(
        self,
        resolved: ResolvedEngine,
        cache: CacheSpec,
        replay: RoutingReplay | None,
        adapters: Adapters,
    ) -> None:
        self.tokenizer, self.vocab_size = resolved.tokenizer, resolved.config.vocab_size
        self.max_model_len, self.max_num_seqs = resolved.max_model_len, resolved.engine.max_num_seqs
        self.eos_token_ids, self.seed = resolved.eos_token_ids, resolved.seed
        static = resolved.engine.batching == "static"
        self.whole_in = BlockAllocator(cache.num_blocks, cache.block_size) if static else None
        self.replay = replay
        self.slo_classes = resolved.engine.scheduling.slo_classes
        drafts = resolved.engine.speculation
        self.rejection = drafts.most > 0 and drafts.acceptance == "rejection"
        self.laid_out(resolved, adapters)
        quant, drawn = resolved.quant, resolved.seed if resolved.source is None else None
        policy = resolved.moe.routing
        told = repr((resolved.config, resolved.kv_cache.value, quant.method, quant.format, drawn, policy))
        self.model = hashlib.sha256(told.encode()).hexdigest()[:16]
        self.by_tenant = resolved.prefix_cache.share == "tenant"
        tenants = resolved.engine.scheduling.tenants
        self.isolated = {name for name, tenant in tenants.items() if tenant.isolated}
        self.engine, self._open = resolved.engine, 0.0
        self.constraints = Constraints(self.tokenizer, self.vocab_size, self.eos_token_ids)
        self._ids = itertools.count()
        self._orders = itertools.count()

    def laid_out(self, resolved: ResolvedEngine, adapters: Adapters) -> None:
        """Takes what belongs to the engine's layout, which may change."""
        self.limited = bool(resolved.moe.by_batch) or resolved.parallel.exchange_capacity is not None
        self.adapters = adapters

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer.json; pass token ids instead of text")
        return self.tokenizer

    def to_generate(
        self,
        prompts: Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None,
        *,
        streams: bool = False,
        record: bool = False,
        arrival: float | None = None,
        options: RequestOptions | Items[RequestOptions] | None = None,
    ) -> list[RequestState]:
        """Returns checked requests, not queued yet; each prompt with its parameters.

        Args:
            streams: keep what each step adds.
            record: record the routing of their steps.
            arrival: `time.perf_counter()` seconds; None: now.
            options: what the engine's policy goes by, for all or for each.

        Raises:
            RequestError: see `LLM.generate`.
        """
        every = one_each(sampling_params, SamplingParams, len(prompts), "sampling_params")
        wanted = one_each(options, RequestOptions, len(prompts), "options")
        arrival = time.perf_counter() if arrival is None else arrival
        requests = []
        for i, (prompt, params, option) in enumerate(zip(prompts, every, wanted, strict=True)):
            if option.slo_class is not None and option.slo_class not in self.slo_classes:
                raise RequestError(f"options: {unknown('slo_class', option.slo_class, self.slo_classes)}")
            text, ids = self._token_ids(prompt, f"prompt {i}")
            self._check(ids, params, f"prompt {i}")
            asked, params = params, drawn(params)
            if streams and asked.best_of is not None:
                raise RequestError("best_of: a stream cannot tell before its end which samples are kept")
            max_tokens = min(params.max_tokens, self.max_model_len - len(ids))
            builders = [OutputProcessor(n, params, self.tokenizer) for n in range(params.n)]
            number = next(self._ids)
            output = RequestOutput(
                str(number), text, ids, [builder.output for builder in builders], RequestMetrics(arrival)
            )
            output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
            # The request's place in the call seeds it, so that it draws the same whatever runs beside it.
            seed = params.seed if params.seed is not None else (self.seed * 1_000_003 + i * 1_009) % 2**32
            request = RequestState(output, builders, streams=streams)
            request.attach(self._samples(ids, params, seed, max_tokens, record))
            request.asked = asked
            adapter = None if option.adapter is None else self.adapters.claim(option.adapter, request)
            verified = self._verified(params)
            identity = None if self.replay is not None else self.identity(option, adapter, verified)
            for sequence in request.sequences:
                sequence.options, sequence.arrival, sequence.verified = option, arrival, verified
                sequence.adapter, sequence.identity = adapter, identity
            requests.append(request)
        if self.replay is not None:
            self.replay.assign(requests)
        return requests

    def check_resumable(self) -> None:
        """Raises `RequestError` where a request's tokens depend on more than itself."""
        reasons = {
            "what else is in its steps (limited capacity, routing by batch)": self.limited,
            "what was drafted (engine.speculation.acceptance=rejection)": self.rejection,
            "a replayed trace": self.replay is not None,
        }
        if what := next((reason for reason, holds in reasons.items() if holds), None):
            raise RequestError(f"interrupt and resume: here a request's tokens depend on {what}")

    def identity(self, options: RequestOptions, adapter: LoadedAdapter | None, verified: bool) -> Hashable:
        """Returns what keys and values are shared by, besides tokens (`moejax.cache.prefix`)."""
        alone = self.by_tenant or options.tenant in self.isolated
        tenant = options.tenant if alone else ()
        return (tenant, verified) if adapter is None else (tenant, verified, adapter.digest)

    def _verified(self, params: SamplingParams) -> bool:
        """Tells whether a request's tokens are verified; every so many-th of those that leave it open."""
        kind, asked = self.engine.deterministic, params.deterministic
        if asked and kind == "none":
            raise RequestError(
                "deterministic=True asks for what engine.deterministic=none does not promise; open the "
                "engine with engine.deterministic=verified, or tiles for all requests"
            )
        if asked is None:
            before, self._open = self._open, self._open + self.engine.verified_share
            asked = int(self._open + 1e-9) > int(before + 1e-9)
        return asked and kind == "verified"

    def model_of(self, request: RequestState) -> str:
        """Returns what a request's model is, its adapter included."""
        adapter = request.sequences[0].adapter
        return self.model if adapter is None else f"{self.model}+{adapter.digest}"

    def resume(self, kept: Checkpoint, options: RequestOptions | None = None) -> RequestState:
        """Returns an interrupted request with the tokens that it has, not queued yet; see `LLM.resume`."""
        self.check_resumable()
        if not isinstance(kept, Checkpoint):
            raise RequestError(f"resume takes a Checkpoint, got {kept!r}")
        ids, params = list(kept.prompt_token_ids), kept.sampling_params
        if len(ids) + params.max_tokens > self.max_model_len:
            raise RequestError(
                f"resume: {len(ids)} tokens and {params.max_tokens} to generate are over the limit of "
                f"{self.max_model_len} (engine.max_model_len)"
            )
        asked: Prompt = {"prompt": kept.prompt, "prompt_token_ids": ids}
        (request,) = self.to_generate([asked], params, options=options)
        if kept.model != (model := self.model_of(request)):
            raise RequestError(f"resume: the checkpoint is of model {kept.model}, and this is {model}")
        wanted = [len(tokens) * (params.logprobs is not None) for tokens in kept.samples]
        sound = len(wanted) == params.n and wanted == [len(known) for known in kept.logprobs]
        sound &= max(0, 0, *itertools.chain(*kept.samples)) < self.vocab_size
        most, sequences = request.roots[0].samples, request.sequences
        for i, sequence in enumerate(sequences if sound else ()):
            sequence.forks, builder = [], request.builders[i]
            for token, logprob in itertools.zip_longest(kept.samples[i], kept.logprobs[i]):
                sound &= not builder.finished
                sequence.tokens.append(token)
                builder.add(token, logprob, end_reason(sequence))
            sequence.state = State.FINISHED if builder.finished else State.WAITING
        if not sound or all(builder.finished for builder in request.builders):
            raise RequestError("resume: the checkpoint's samples are none that its parameters can lead to")
        request.attach(roots_of(sequences, most))
        request.roots = [root for root in request.roots if root.state is State.WAITING]
        # What it has computed of the prompt it computes again.
        request.roots[0].prompt_logprobs = self.logprobs_size(params.prompt_logprobs)
        return request

    def _token_ids(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """Returns a prompt's text, where it is text, and its checked token ids."""
        text = None
        if isinstance(prompt, Mapping):  # vLLM's: a text, or token ids with or without their text
            if not prompt or prompt.keys() - {"prompt", "prompt_token_ids"}:
                raise RequestError(f"{name} takes the keys prompt and prompt_token_ids, got {prompt!r}")
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(f"{name} is empty")
            text, prompt = prompt, self.need_tokenizer().encode(prompt)
        ids = flat_ids(prompt)
        if ids is None:
            raise RequestError(f"{name} must be text or a flat list of token ids")
        if not ids:
            raise RequestError(f"{name} is empty")
        strange = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"{name}: token id {strange} out of range; the vocabulary is 0..{self.vocab_size - 1}"
            )
        return text, ids

    def _check(self, ids: list[int], params: SamplingParams, name: str) -> None:
        """Raises `RequestError` for a prompt without room for output, or for ends that can never come."""
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"{name} has {len(ids)} tokens; with at least one to generate that is over the limit "
                f"of {self.max_model_len} (engine.max_model_len)"
            )
        if params.structured_outputs and self.whole_in is not None:
            raise RequestError("structured_outputs does not go with engine.batching=static; use continuous")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this model has none; use logit_bias")
        for key, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            if strange := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise RequestError(
                    f"{name}: {key} has {strange[0]}, out of range; the vocabulary is "
                    f"0..{self.vocab_size - 1}"
                )

    def _samples(
        self, ids: list[int], params: SamplingParams, seed: int, max_tokens: int, record: bool
    ) -> list[Sequence]:
        """Returns a request's sequences; more than fit the batch at a time come as several groups."""
        biases, stop_ids = self.biases(params), end_tokens(params, self.eos_token_ids)
        mode = self.mode(params, biases)
        unasked = "penalties" if mode.penalty else None  # they want to have seen every token
        if params.prompt_logprobs is not None:
            unasked = "prompt_logprobs"
        if self.replay is not None:
            unasked = "replayed routing"
        constraints = self.constraints.make(params.structured_outputs, params.allowed_token_ids, params.n)
        samples = [
            Sequence(
                tokens=list(ids),
                prompt_len=len(ids),
                params=params,
                max_length=len(ids) + max_tokens,
                order=next(self._orders),
                seed=seed + n,
                stop_ids=stop_ids,
                record=record,
                prompt_logprobs=self.logprobs_size(None if n else params.prompt_logprobs),
                biases=biases,
                mode=mode,
                constraint=constraint,
                not_looked_up=unasked,
            )
            for n, constraint in enumerate(constraints)
        ]
        most = self.max_num_seqs
        if self.whole_in is not None:
            each = self.whole_in.blocks_for(len(ids) + max_tokens - 1)
            most = min(most, max(1, self.whole_in.num_blocks // each))
        return roots_of(samples, most)

    def biases(self, params: SamplingParams) -> list[Bias]:
        """Returns what a request's parameters add to logits."""
        biases = [Bias(token, value) for token, value in params.logit_bias.items()]
        if params.min_tokens:
            ends = end_tokens(params, self.eos_token_ids).union(self.eos_token_ids)
            biases += [Bias(token, -math.inf, until=params.min_tokens) for token in sorted(ends)]
        for word in params.bad_words:
            # As vLLM has it: the word as it stands, and after a space where that is as long another token.
            plain, spaced = (
                tuple(self.need_tokenizer().encode(text, add_special_tokens=False))
                for text in (word.lstrip(), f" {word.lstrip()}")
            )
            each = (plain, spaced) if len(plain) == len(spaced) and plain[:1] != spaced[:1] else (plain,)
            biases += [Bias(ids[-1], -math.inf, after=ids[:-1]) for ids in each if ids]
        return biases

    def to_score(self, sequences: Items[Prompt], adapter: str | None = None) -> list[RequestState]:
        """Returns requests for the log-probabilities of sequences of at least two tokens each, by an adapter.

        Raises:
            RequestError: see `LLM.score`.
        """
        every = [self._token_ids(sequence, f"sequence {i}")[1] for i, sequence in enumerate(sequences)]
        for i, ids in enumerate(every):
            if len(ids) < 2:
                raise RequestError(f"sequence {i} has one token; scoring needs at least 2")
            if len(ids) > self.max_model_len:
                raise RequestError(
                    f"sequence {i} has {len(ids)} tokens, over the limit of {self.max_model_len}"
                )
        requests = [self._to_score(ids) for ids in every]
        if adapter is not None:
            for request in requests:
                request.sequences[0].adapter = self.adapters.claim(adapter, request)
        if self.replay is not None:
            self.replay.assign(requests, "sequence")
        return requests

    def _to_score(self, ids: list[int]) -> RequestState:
        output = RequestOutput(str(next(self._ids)), None, ids, [], RequestMetrics(time.perf_counter()))
        output.prompt_logprobs = [None]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        sample = Sequence(list(ids), len(ids), params, len(ids), next(self._orders), score=True)
        sample.prompt_logprobs, sample.mode, sample.not_looked_up = 0, self.mode(params, ()), "scores"
        request = RequestState(output, [])
        request.attach([sample])
        return request

    def mode(self, params: SamplingParams, biases: Items[Bias]) -> SamplerMode:
        """Returns what a request with these parameters and their `biases` needs of the sampler.
        Log-probabilities and biases come in a few sizes only, since each is a program of its own."""
        return sampler_mode([params], self.vocab_size)._replace(
            logprobs=self.logprobs_size(params.logprobs),
            biases=1 << (len(biases) - 1).bit_length() if biases else 0,
            rejection=self.rejection and not (params.greedy or params.penalized),
            masked=params.constrained,
        )

    def logprobs_size(self, count: int | None) -> int:
        """Returns how many likeliest tokens steps report where `count` are asked for; -1 for None."""
        wanted = -1 if count is None else count
        return min(next(n for n in (-1, 0, 1, 5, 20, 100, 1024) if n >= wanted), self.vocab_size)


def drawn(params: SamplingParams) -> SamplingParams:
    """Returns what a request's samples are drawn with: of `best_of` each, with what they are ranked by."""
    if params.best_of is None:
        return params
    told = 0 if params.logprobs is None else params.logprobs
    return dataclasses.replace(params, n=params.best_of, best_of=None, logprobs=told)


def roots_of(samples: Items[Sequence], most: int) -> list[Sequence]:
    """Returns the sequences to queue, in order: of samples without tokens of their own each first of so many,
    with the others as its forks; a sample that has some comes alone."""
    roots: list[Sequence] = []
    for sample in samples:
        if roots and roots[-1].samples < most and not (roots[-1].generated or sample.generated):
            roots[-1].forks.append(sample)
        else:
            roots.append(sample)
    return roots


def end_tokens(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Returns the tokens that end a sample: those asked for, and the model's own unless they are ignored."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
