"""Prefill and decode apart: tokens as those of one engine, whatever becomes of the prefill engine."""

import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import (
    LLM,
    EngineConfig,
    MoeConfig,
    ParallelConfig,
    PrefixCacheConfig,
    QuantConfig,
    SamplingParams,
)
from moejax.bench.backends.adapters import open_ours
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.disaggregating import DisaggregatingBackend, disaggregated_rows
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.cache.pool import block_bytes
from moejax.core.adapters import AdaptersConfig
from moejax.core.errors import ConfigError, DeviceError, RequestError
from moejax.core.scheduling import KvPolicyConfig, SpeculationConfig
from moejax.engine import disaggregated as apart
from moejax.engine.disaggregated import Disaggregated
from moejax.engine.reconfigure import _read
from moejax.engine.requests.api import RequestOutput
from moejax.engine.scheduling.sequence import Sequence
from tests.engine.mesh_models import FAMILIES as EVERY
from tests.engine.mesh_models import prompts
from tests.engine.test_reconfigure import ENGINE as NARROW
from tests.engine.test_reconfigure import FAMILIES, LAYOUTS, PARAMS, asked, tokens
from tests.model_shapes import EIGHT_WAY

pytestmark = pytest.mark.multidevice

ENGINE = dataclasses.replace(NARROW, window_cache="full")
ONE_LAYER = EIGHT_WAY.replace(num_layers=1, moe_layers=(True,), sliding_windows=(None,))


def opened(config: Any = ONE_LAYER, layout: str = "single", first: int = 0, **options: Any) -> LLM:
    parallel = ParallelConfig(**LAYOUTS[layout], first_device=first)
    return LLM(config, load_format="dummy", parallel=parallel, **{"engine": ENGINE} | options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Tests use it, and leave it idle."""
    with opened() as llm:
        llm.warmup(max_total_len=40, sampling_params=PARAMS)
        yield llm


@pytest.fixture
def pair(llm: LLM) -> Iterator[Disaggregated]:
    """Both on one device, so that they share programs."""
    pair = Disaggregated(llm.variant(ENGINE), llm.variant(ENGINE), timeout_s=20)
    pair.warmup(max_total_len=40, sampling_params=PARAMS)
    yield pair
    conserved(pair)
    pair.close()


def conserved(pair: Disaggregated) -> None:
    """All blocks and slots are free again, and nothing is remembered of requests."""
    until = time.monotonic() + 30
    engines = [each for each in (pair.decode, pair._given) if isinstance(each, LLM)]
    while pair.lost is None and any(not each.engine.scheduler.idle for each in engines):
        assert time.monotonic() < until  # an aborted prompt may be in the middle of a step
    assert not (pair._live or pair._queued or pair._away)
    for llm in engines if pair.lost is None else engines[:1]:
        scheduler = llm.engine.scheduler
        scheduler.check_integrity()
        for group in getattr(scheduler, "groups", [scheduler]):
            assert group.allocator.num_used == 0 and len(group.free_slots) == group.max_num_seqs


def finish(pair: Disaggregated) -> None:
    until = time.monotonic() + 120
    while pair.step():
        pair.decode.engine.scheduler.check_integrity()
        assert time.monotonic() < until, "it hangs"


def content(outputs: list[RequestOutput]) -> Any:
    def of(sample: Any) -> Any:
        logprobs = [(each.rank, sorted(each.top)) for each in sample.logprobs or []]
        return sample.token_ids, sample.text, logprobs, sample.finish_reason, sample.stop_reason

    return [[of(sample) for sample in output.outputs] for output in outputs]


def test_outputs_are_those_of_one_engine(llm: LLM, pair: Disaggregated) -> None:
    """Samples, log-probabilities, penalties, stop tokens, in a cache in which they displace each other."""
    asks = list(map(list, zip(*asked(12), strict=True)))
    want = llm.generate(*asks)
    stops: Any = [
        dataclasses.replace(p, stop_token_ids=(o.outputs[0].token_ids[i % 3],))
        for i, (p, o) in enumerate(zip(asks[1], want, strict=True))
    ]
    for params in (asks[1], stops):
        want, found = (each.generate(asks[0], params) for each in (llm, pair))
        assert content(found) == content(want)
        for output in found:
            assert output.metrics.scheduled_time is not None and output.metrics.ttft > 0
    handed = [ids for ids, params in zip(*asks, strict=True) if not params.penalized]
    blocks = sum(-(-len(ids) // ENGINE.block_size) for ids in handed)
    counts = {"handed_over": 2 * len(handed), "decode_only": 2 * (12 - len(handed)), "blocks": 2 * blocks}
    assert pair.counts == {
        **counts,
        "bytes": 2 * blocks * block_bytes(llm.config, ENGINE.block_size, "float32"),
    }


def test_prompts_are_not_computed_again(pair: Disaggregated) -> None:
    seen = []
    pair.decode.engine.on_step = seen.append
    pair.generate(prompts(3), PARAMS[0])
    assert sum(step.prefill_tokens for step in seen) == 0
    assert sum(step.decode_tokens for step in seen) == 3 * (PARAMS[0].max_tokens - 1)


def test_requests_end_wherever_they_are(llm: LLM, pair: Disaggregated) -> None:
    asks = asked(7)
    want = tokens(llm.generate(*map(list, zip(*asks, strict=True))))
    late = [pair.submit(prompt, dataclasses.replace(PARAMS[0], max_time_s=1e-9)) for prompt in prompts(2)]
    gone, kept = ([pair.submit(*each) for each in asks] for _ in range(2))
    for turn, output in enumerate(gone):
        pair.abort(output.request_id)
        if turn % 2:
            pair.step()
    finish(pair)
    assert [output.outputs[0].finish_reason for output in late] == ["time"] * 2
    assert all(sample.finish_reason for output in gone for sample in output.outputs)
    assert tokens(kept) == want


def test_a_paused_engine_says_so(pair: Disaggregated) -> None:
    pair.pause("keep")
    with pytest.raises(RequestError, match="paused"):
        pair.generate(prompts(2), PARAMS[0])
    pair.unpause()


def test_no_more_are_under_way_than_can_run(pair: Disaggregated) -> None:
    outputs = [pair.submit(prompt, PARAMS[0]) for prompt in prompts(20)]
    while pair.step():
        waiting = pair.decode.engine.scheduler.waiting()
        held = sum(sequence.blocks_of_host is not None for sequence in waiting)
        assert len(pair._away) + held <= 2 * ENGINE.max_num_seqs
    assert all(output.finished for output in outputs)


def test_what_the_prefill_engine_refuses_is_computed_all_the_same(
    llm: LLM, pair: Disaggregated, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, submit = [[1, 2], [3] * 9], pair._given.submit

    def refuses(prompt: list[int], *more: Any, **options: Any) -> RequestOutput:
        return submit(prompt if prompt == asks[0] else [], *more, **options)

    monkeypatch.setattr(pair._given, "submit", refuses)
    assert tokens(pair.generate(asks, PARAMS[0])) == tokens(llm.generate(asks, PARAMS[0]))
    assert pair.counts["recomputed"] == pair.counts["handed_over"] == 1
    with pytest.raises(RequestError, match="out of range"):
        pair.submit([10**6], PARAMS[0])


@pytest.mark.parametrize("ending", ["ends", "damages", "stops halfway", "falls silent", "takes nothing"])
def test_a_peer_that_is_lost(llm: LLM, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the prefill engine: whatever it does, requests are computed in time."""
    stop = threading.Event()

    def serve(end: Any, *_: Any) -> None:
        apart.send(end, "ready", apart.prepare(llm, saving=True))
        if ending == "takes nothing":
            stop.wait()
        apart.receive(end, None)
        if ending == "damages":
            end.send_bytes(b"\0\0\0\1" + b"text")
        elif ending == "stops halfway":
            os.write(end.fileno(), (1000).to_bytes(4) + b"the first of a thousand bytes")
        if ending in ("stops halfway", "falls silent"):
            stop.wait()
        end.close()

    monkeypatch.setattr(apart, "serve", serve)
    pair = Disaggregated(llm, llm.variant(ENGINE), timeout_s=1.0)
    outputs, start = [pair.submit(prompt, PARAMS[0]) for prompt in prompts(4)], time.monotonic()
    if ending == "takes nothing":
        pair.step()
        pair._tell("call", b" " * 10**7)
    finish(pair)
    assert time.monotonic() - start < 30
    assert pair.lost is not None and pair.counts["lost_peers"] == 1 and pair.counts["recomputed"] == 4
    assert tokens(outputs) == tokens(llm.generate(prompts(4), PARAMS[0]))
    stop.set()
    conserved(pair)
    pair.close()


REFUSED: dict[str, dict[str, Any]] = {
    "engine.batching=static": {"engine": dataclasses.replace(ENGINE, batching="static")},
    "engine.adapters.slots": {
        "engine": dataclasses.replace(ENGINE, adapters=AdaptersConfig(slots=1, rank=2))
    },
    "engine.capture_routing": {"engine": dataclasses.replace(ENGINE, capture_routing=True)},
    "engine.kv_policy": {
        "engine": dataclasses.replace(ENGINE, kv_policy=KvPolicyConfig(method="window", sinks=4, recent=8))
    },
    "engine.window_cache=full": {
        "config": EVERY["gpt_oss"],
        "engine": dataclasses.replace(ENGINE, window_cache="window"),
    },
    "linear attention": {"config": EVERY["minimax"]},
    "engine.deterministic=verified": {
        "engine": dataclasses.replace(ENGINE, deterministic="verified", moe=MoeConfig())
    },
    "fill=False": {"fill": False},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_engines_that_stay_whole(reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^disaggregate does not go with [^\n]*{reason}[^\n]*$"):
        apart.prepare(opened(**REFUSED[reason]), saving=True)


def test_engines_that_differ(llm: LLM) -> None:
    for options in ({"seed": 1}, {"engine": dataclasses.replace(ENGINE, block_size=2, num_blocks=40)}):
        with pytest.raises(ConfigError, match="the engines' models or blocks differ; give both the same"):
            Disaggregated(opened(**options), llm.variant(ENGINE))


@pytest.mark.slow
def test_tiles_give_one_engine_s_bits() -> None:
    """Log-probabilities too; of another layout or tile the bits are others, which is refused."""
    tiles = dataclasses.replace(ENGINE, deterministic="tiles", tile_tokens=4, moe=MoeConfig())
    asks = list(map(list, zip(*asked(8), strict=True)))
    params = [dataclasses.replace(each, logprobs=2) for each in asks[1]]
    with opened(ONE_LAYER, "tp2", engine=tiles) as one:
        want = one.generate(asks[0], params)
    decode = opened(ONE_LAYER, "tp2", 2, engine=tiles)
    for other in (
        opened(ONE_LAYER, engine=tiles),
        opened(ONE_LAYER, "tp2", engine=dataclasses.replace(tiles, tile_tokens=8)),
        opened(ONE_LAYER, "tp2", engine=ENGINE),
    ):
        assert apart.prepare(other, saving=True) != apart.prepare(decode, saving=False)
    pair = Disaggregated(opened(ONE_LAYER, "tp2", engine=tiles), decode)
    found = pair.generate(asks[0], params)
    for mine, other in zip(found, want, strict=True):
        for sample, twin in zip(mine.outputs, other.outputs, strict=True):
            assert sample.token_ids == twin.token_ids and sample.logprobs == twin.logprobs
    assert pair.counts["handed_over"] > 0
    conserved(pair)
    pair.close()


# -- layouts, models, engines ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_layouts(family: str) -> None:
    """Of four devices each, side by side."""
    config, layouts = FAMILIES[family], [name for name in LAYOUTS if name != "ep4_tp2"]
    asks = list(map(list, zip(*asked(7), strict=True)))
    warm: dict[str, Any] = {"max_total_len": 40, "sampling_params": PARAMS}
    decodes, prefills = ({name: opened(config, name, at) for name in layouts} for at in (0, 4))
    for each in (*decodes.values(), *prefills.values()):
        each.warmup(**warm)
    want = tokens(decodes["single"].generate(*asks))
    for prefill, decode in itertools.product(layouts, repeat=2):
        pair = Disaggregated(prefills[prefill].variant(ENGINE), decodes[decode].variant(ENGINE))
        pair.warmup(**warm)
        assert tokens(pair.generate(*asks)) == want, (prefill, decode)
        assert pair.counts["handed_over"] == 6 and pair.counts["decode_only"] == 1
        conserved(pair)
        pair.close()


ENGINES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "prefixes": (EVERY["qwen3_moe"], {"prefix_cache": PrefixCacheConfig(enabled=True)}, {}),
    "prefixes on the device": (
        EVERY["qwen3_moe"],
        {"prefix_cache": PrefixCacheConfig(enabled=True, place="device")},
        {},
    ),
    "swap": (EVERY["qwen3_moe"], {"preemption": "swap"}, {}),
    "plain": (EVERY["qwen3_moe"], {"overlap": False}, {}),
    "ngram": (EVERY["qwen3_moe"], {"speculation": SpeculationConfig(method="ngram", k=2)}, {}),
    "fair": (EVERY["qwen3_moe"], {"policy": "fair"}, {}),
    "codes": (EVERY["deepseek_v3"], {}, {"quant": QuantConfig(method="rtn", format="int8", kv_cache="int8")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_other_engines(name: str) -> None:
    """Prompts that have a beginning in common, twice."""
    config, settings, options = ENGINES[name]
    engine = dataclasses.replace(ENGINE, **settings)
    common = [5] * 6
    asks = [common + prompt for prompt in prompts(9)], [PARAMS[i % 4] for i in range(9)]
    want = tokens(opened(config, engine=engine, **options).generate(*asks))
    pair = Disaggregated(
        opened(config, "tp2", 2, engine=engine, **options), opened(config, "tp2", engine=engine, **options)
    )
    for _ in range(2):
        assert tokens(pair.generate(*asks)) == want
    assert pair.counts["handed_over"] == 14
    pair.clear_prefix_cache()
    conserved(pair)
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "codes"), [("gqa", "int8"), ("gqa", "int4"), ("latents", "int8")])
def test_codes_are_equal_to_the_bit(family: str, codes: Any) -> None:
    """What lies in the decoding engine's blocks is what the other one has computed."""
    quant = QuantConfig(kv_cache=codes)
    decode = opened(FAMILIES[family], "tp2", quant=quant)
    pair = Disaggregated(opened(FAMILIES[family], "dp2_tp2", 2, quant=quant), decode)
    compared, scheduler = [], decode.engine.scheduler
    admit = scheduler._admit

    def admitted(sequence: Sequence, plan: Any) -> None:
        arrays, n = sequence.blocks_of_host, sequence.prompt_len // ENGINE.block_size
        admit(sequence, plan)
        if arrays is not None and n:
            compared.append((list(sequence.blocks[:n]), [array[:n] for array in arrays]))

    scheduler._admit = admitted  # type: ignore[method-assign]
    outputs = [pair.submit(prompt, PARAMS[0]) for prompt in prompts(4)]
    checked = 0
    while pair.step():
        while compared:
            blocks, arrays = compared.pop()
            there = _read(decode.runner, np.zeros(len(blocks), np.int64), np.array(blocks))
            assert {array.dtype.name for array in there} == {"int8", "float32"}
            for mine, theirs in zip(there, arrays, strict=True):
                assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()
            checked += 1
    assert checked >= 3 and all(output.finished for output in outputs)
    conserved(pair)
    pair.close()


@pytest.mark.slow
def test_texts_grammars_and_logprobs(model_dir: Path) -> None:
    engine = EngineConfig(seq_buckets=[8], token_buckets=[16, 64], block_buckets=[16])
    llm = LLM(model_dir, engine=engine)
    pair = Disaggregated(LLM(model_dir, engine=engine), llm.variant(engine))
    texts = ["the cat sat on the mat", "a dog", "one two three"]
    plain = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    ends = [output.outputs[0].text for output in llm.generate(texts, plain)]
    kinds = [
        plain,
        SamplingParams(max_tokens=12, temperature=0.0, stop=[ends[0][1:4], ends[1][:2]], min_tokens=2),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, best_of=3, n=2),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=9),
        SamplingParams(max_tokens=9, structured_outputs={"choice": ["mat", "matter", "dog"]}),
        SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=1, bad_words=[ends[0][:3]]),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=6, presence_penalty=1.0, allowed_token_ids=[3, 4, 5, 6]),
    ]
    for params in kinds:
        assert content(pair.generate(texts, params)) == content(llm.generate(texts, params)), params
    conserved(pair)
    pair.close()


# -- a process -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_is_killed_stopped_and_started_again(llm: LLM) -> None:
    """At any instant, within a transfer too; in a stopped one all waits end."""
    asks = list(map(list, zip(*asked(14), strict=True)))
    want = tokens(llm.generate(*asks))
    given = {"model": ONE_LAYER, "load_format": "dummy", "engine": ENGINE}
    pair = Disaggregated(given, llm.variant(ENGINE), timeout_s=60)
    pair.warmup(max_total_len=40, sampling_params=PARAMS)
    start = time.monotonic()
    assert tokens(pair.generate(*asks)) == want and pair.counts["handed_over"] == 11
    whole_s, draw = time.monotonic() - start, random.Random(0)
    for number in range(5):
        outputs = [pair.submit(*each) for each in zip(*asks, strict=True)]
        timer = threading.Timer(whole_s * draw.random(), pair._peer.kill)
        timer.start()
        finish(pair)
        timer.join()
        assert tokens(outputs) == want
        conserved(pair)
        pair.generate(*asks)  # it is noticed now, if all were done before
        assert pair.lost is not None and "exit code -9" in pair.lost
        assert pair.counts["lost_peers"] == number + 1
        pair.start()
    assert tokens(pair.generate(*asks)) == want
    pair._timeout_s = 2.0
    os.kill(pair._peer.pid, signal.SIGSTOP)
    assert tokens(pair.generate(*asks)) == want and "said nothing for 2 s" in str(pair.lost)
    conserved(pair)
    pair.close()


@pytest.mark.slow
def test_a_process_that_does_not_start(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"model": "nowhere", "engine": ENGINE}
    with pytest.raises(ConfigError, match="nowhere"):
        Disaggregated(given, llm.variant(ENGINE))
    monkeypatch.setattr(apart, "_START_S", 0.1)
    with pytest.raises(DeviceError, match="it is not ready after"):
        Disaggregated(given, llm.variant(ENGINE))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_as_a_backend(llm: LLM) -> None:
    """Under a benchmark's names, with what its table says."""
    options = BackendOptions(disaggregate="devices", disaggregate_to=ParallelConfig(first_device=1))
    backend = open_ours(options, llm.variant(ENGINE))
    assert isinstance(backend, DisaggregatingBackend)
    asks = list(map(list, zip(*asked(7), strict=True)))
    backend.prepare(max_num_seqs=4, max_total_len=40, params=PARAMS)
    assert tokens(backend.generate(*asks)) == tokens(llm.generate(*asks))
    outputs = [backend.submit(*each) for each in zip(*asks, strict=True)]
    while backend.step():
        pass
    assert all(output.finished for output in outputs)
    (row,) = disaggregated_rows({"pair": backend, "one": MoejaxBackend(llm)})
    assert (row["handed_over"], row["decode_only"], row["lost_peers"]) == (12, 2, 0)
    assert row["kv_sent_bytes"] == row["kv_formula_bytes"] > 0
    with pytest.raises(ConfigError, match="beside a baseline without it"):
        backend.beside(ENGINE)
    backend.close()
