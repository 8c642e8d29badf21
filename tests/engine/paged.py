"""What the tests of the paged engine share: narrow configurations, workloads, and one-by-one generation."""

import dataclasses
from typing import Any

import numpy as np

from moejax.core.config import EngineConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Logprob, RequestOutput, SamplingParams
from moejax.engine.step.ledger import CompileLedger
from moejax.models.decoder import Decoder
from tests.engine.tiny import VOCAB
from tests.plain.contiguous import ContiguousEngine, Row

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# One program for steps that decode and one for steps with chunks; eight tokens a step cut most prompts.
TIGHT = EngineConfig(
    compile_cache=False,
    max_model_len=32,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    block_size=4,
    num_blocks=32,
    seq_buckets=[4],
    token_buckets=[8],
    block_buckets=[32],
)
# Two sequences of 32 tokens do not fit.
SCARCE = dataclasses.replace(TIGHT, num_blocks=12)
# Of one step of the one-layer model: projections, scores, values, output, experts, vocabulary.
REDUCTIONS = (32, 8, 32, 32, 32, 16, 2, 32)


def tight(**changes: Any) -> EngineConfig:
    return dataclasses.replace(TIGHT, **changes)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, VOCAB, length).tolist()


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields))


def tokens(outs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in out.outputs] for out in outs]


class OneByOne:
    """Each sample alone through the plain loop over a contiguous cache."""

    def __init__(self, model: Decoder) -> None:
        self._engine = ContiguousEngine(model, CompileLedger())
        self._known: dict[Any, tuple[list[int], list[Logprob | None]]] = {}

    def steps(
        self, ids: list[int], params: SamplingParams, seed: int | None = None
    ) -> tuple[list[int], list[Logprob | None]]:
        """Tokens and log-probabilities of one sample, its random stream being `seed`'s."""
        seed = params.seed or 0 if seed is None else seed
        plain = dataclasses.replace(params, n=1, seed=None)
        key = tuple(ids), repr(plain), seed
        if key not in self._known:
            found = []
            for steps, ended in self._engine.run([Row(ids, plain, seed, plain.max_tokens)]):
                found.append(steps[0])
                if steps[0].token in params.stop_token_ids:
                    ended.add(0)
            self._known[key] = [s.token for s in found], [s.logprob for s in found]
        return self._known[key]

    def samples(self, ids: list[int], params: SamplingParams) -> list[list[int]]:
        """All n samples: sample i draws from seed + i."""
        return [self.steps(ids, params, (params.seed or 0) + i)[0] for i in range(params.n)]

    def score(self, ids: list[int]) -> np.ndarray:
        return self._engine.score([ids])[0]


def assert_clean(llm: LLM) -> None:
    """Nobody holds a block or a slot, and the bookkeeping is whole."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.idle and scheduler.allocator.num_used == 0
    assert len(scheduler.free_slots) == scheduler.max_num_seqs
    assert not llm._submitted
    assert llm.engine._in_flight is None
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["used_blocks"]) == (0, 0, 0)
