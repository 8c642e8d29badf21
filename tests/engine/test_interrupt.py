"""Interrupted and resumed, a request has the output that it would have had: at any step, on any engine."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from moejax import LLM, MoeConfig, ParallelConfig
from moejax.core.errors import RequestError
from moejax.engine.requests.api import Checkpoint, RequestOutput, SamplingParams
from tests.engine.paged import TIGHT, assert_clean, greedy, prompt, tight
from tests.engine.tiny import main_config, small_config, write_model
from tests.examples import slow_but

PROMPTS = [prompt(n, 5) for n in (5, 9, 3, 12, 6)]
FAST, EVERY = ("0 2", "4", "5 3", "9"), [str(k) for k in range(22) if k not in (4, 9)]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=11, ignore_eos=True)


# Each asks for so much that all steps are one program for decodes and one for chunks.
RICH: dict[str, Any] = {
    "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 1, "prompt_logprobs": 1,
    "logit_bias": {5: 2.0, 6: 1.0, 7: -3.0, 8: 1.0, 9: 1.0}, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One layer, with a tokenizer."""
    return LLM(write_model(tmp_path_factory.mktemp("one"), small_config()), engine=tight(num_blocks=16))


@pytest.fixture(scope="module")
def plain(engine: LLM) -> LLM:
    return engine.variant(tight(num_blocks=16, overlap=False))


@pytest.fixture(scope="module")
def narrow(engine: LLM) -> LLM:
    """In the plain loop, with other blocks, and too few of them."""
    return engine.variant(tight(overlap=False, block_size=2, num_blocks=24))


def finish(llm: LLM) -> None:
    while llm.step():
        pass
    assert_clean(llm)


def seen(out: RequestOutput) -> Any:
    """All that must be equal, and what rounding may touch."""
    samples = [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in out.outputs]
    entries = [entry for s in out.outputs for entry in s.logprobs or ()] + (out.prompt_logprobs or [])
    exact = [None if e is None else (e.rank, list(e.top)) for e in entries]
    logprobs = [x for e in entries if e is not None for x in (e.logprob, *e.top.values())]
    return (out.prompt, out.prompt_token_ids, samples, exact), pytest.approx(logprobs, abs=1e-5)


Workload = tuple[list[SamplingParams], list[RequestOutput]]


@pytest.fixture(scope="module")
def workload(engine: LLM) -> Callable[[str], Workload]:
    """Parameters of the requests, and what they get when nobody interrupts them."""

    def ask(**more: Any) -> SamplingParams:
        return SamplingParams(**(RICH | {"max_tokens": 9} | more))

    def text(params: SamplingParams) -> str:
        return engine.generate([PROMPTS[3]], params)[0].outputs[0].text[4:6]

    @functools.cache
    def made(kind: str) -> Workload:
        if kind == "alike":
            asked = [
                ask(n=2),
                ask(seed=7, frequency_penalty=0.5, max_tokens=40),
                ask(min_tokens=6, bad_words=["th", "e"], presence_penalty=0.3),
                ask(stop=[text(ask()), "never in it"], include_stop_str_in_output=True),
                ask(n=2, top_k=9, max_time_s=1e6, ignore_eos=False, max_tokens=5),
            ]
        else:
            asked = [
                dataclasses.replace(SAMPLED, n=4, logprobs=2),
                dataclasses.replace(SAMPLED, seed=7, n=2, repetition_penalty=1.4, frequency_penalty=0.5),
                greedy(13, min_tokens=6, bad_words=["th", "e"], logit_bias={5: 2.0}, presence_penalty=0.3),
                greedy(11, stop=[text(greedy(11)), "never in it"]),
                dataclasses.replace(SAMPLED, prompt_logprobs=1, top_k=9, max_tokens=40),
            ]
        outs = [engine.submit(ids, params) for ids, params in zip(PROMPTS, asked, strict=True)]
        finish(engine)
        assert outs[3].outputs[0].finish_reason == "stop"
        return asked, outs

    return made


@pytest.mark.parametrize(
    ("kind", "steps"),
    slow_but(
        [("alike", steps) for steps in FAST],
        [(kind, steps) for kind in ("alike", "mixed") for steps in (*FAST, *EVERY)],
    ),
)
def test_at_any_step(
    kind: str,
    steps: str,
    engine: LLM,
    plain: LLM,
    request: pytest.FixtureRequest,
    workload: Callable[[str], Workload],
) -> None:
    """Through text, on one engine after another, in a different order."""
    asked, whole = workload(kind)
    outs = [engine.submit(ids, params) for ids, params in zip(PROMPTS, asked, strict=True)]
    engines, states = [engine, request.getfixturevalue("narrow") if kind == "mixed" else plain], set()
    for i, count in enumerate(map(int, steps.split())):
        now, then = engines[i % 2], engines[(i + 1) % 2]
        for _ in range(count):
            now.step()
        for k in reversed(range(len(outs))):
            if not outs[k].finished:
                before = [list(sample.token_ids) for sample in outs[k].outputs]
                kept = now.interrupt(outs[k].request_id)
                reasons = {sample.finish_reason for sample in outs[k].outputs}
                assert outs[k].finished and "interrupt" in reasons <= {"interrupt", "stop", "length"}
                assert Checkpoint.from_json(kept.to_json()) == kept and outs[k].error is None
                outs[k] = then.resume(Checkpoint.from_json(kept.to_json()))
                assert [sample.token_ids for sample in outs[k].outputs] == before
                states.add(any(before))
        assert_clean(now)
    finish(then)
    assert states
    for out, want in zip(outs, whole, strict=True):
        got, expected = seen(out), seen(want)
        assert got[0] == expected[0] and got[1].expected == expected[1]


def test_metrics_start_anew(engine: LLM) -> None:
    out = engine.submit(PROMPTS[0], SamplingParams(**RICH, max_tokens=8))
    for _ in range(4):
        engine.step()
    had = len(out.outputs[0].token_ids)
    resumed = engine.resume(engine.interrupt(out.request_id))
    finish(engine)
    assert len(resumed.metrics.token_times) == 8 - had < 8
    assert resumed.metrics.arrival_time > out.metrics.arrival_time


# -- refusals --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(engine: LLM) -> Checkpoint:
    out = engine.submit(PROMPTS[0], SamplingParams(**RICH, max_tokens=11, n=2))
    for _ in range(4):
        engine.step()
    return engine.interrupt(out.request_id)


BAD: dict[str, Any] = {
    "no json": (lambda text: text[:-5], r"^not a checkpoint of LLM.interrupt: JSONDecodeError"),
    "a list": (lambda text: "[1]", r"^not a checkpoint of LLM.interrupt"),
    "a number": (lambda text: "1", r"^not a checkpoint of LLM.interrupt"),
    "version": ({"version": 2}, r"^checkpoint: version 2; this moejax reads 1$"),
    "key": ({"colour": "red"}, r"^Checkpoint: unknown keyword 'colour'"),
    "tokens": ({"prompt_token_ids": [1, "x"]}, r"^checkpoint.prompt_token_ids\[1\] must be an integer"),
    "params": ({"sampling_params": {"temperature": -1}}, r"^temperature must be a number of at least 0"),
    "logprobs": ({"logprobs": [[{"rank": 1}]]}, r"^not a checkpoint of LLM.interrupt: KeyError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, kept: Checkpoint) -> None:
    change, line = BAD[name]
    text = kept.to_json()
    text = change(text) if callable(change) else json.dumps(json.loads(text) | change)
    with pytest.raises(RequestError, match=line) as caught:
        Checkpoint.from_json(text)
    assert "\n" not in str(caught.value)


def test_missing_fields(kept: Checkpoint) -> None:
    fields = json.loads(kept.to_json())
    for name in fields:
        with pytest.raises(RequestError, match=f"^not a checkpoint of LLM.interrupt.*{name}"):
            Checkpoint.from_json(json.dumps({key: x for key, x in fields.items() if key != name}))


def test_what_cannot_be_resumed(engine: LLM, kept: Checkpoint) -> None:
    samples, limit = kept.samples, "are none that its parameters can lead to"
    twelve = dataclasses.replace(kept.sampling_params, max_tokens=len(samples[0]))
    for changes, line in (
        ({"model": "0" * 16}, "is of model 0000000000000000, and this is"),
        ({"prompt_token_ids": (1,) * 30}, r"30 tokens and 11 to generate are over the limit of 32"),
        ({"prompt_token_ids": (99999,)}, r"token id 99999 out of range"),
        ({"samples": samples[:1]}, limit),
        ({"samples": (samples[0], samples[1][:-1])}, limit),
        ({"logprobs": kept.logprobs[:1]}, limit),
        ({"samples": (samples[0], (*samples[1][:-1], 10**12))}, limit),
        ({"sampling_params": twelve}, limit),  # all have ended
        ({"sampling_params": dataclasses.replace(twelve, max_tokens=1)}, limit),
        ({"sampling_params": dataclasses.replace(kept.sampling_params, logprobs=None)}, limit),
    ):
        with pytest.raises(RequestError, match=line) as caught:
            engine.resume(dataclasses.replace(kept, **changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="no submitted request 'x' is running"):
        engine.interrupt("x")
    text: Any = kept.to_json()
    with pytest.raises(RequestError, match=r"resume takes a Checkpoint, got '\{"):
        engine.resume(text)
    assert_clean(engine)
    engine.resume(kept)
    finish(engine)


def test_only_where_a_request_is_alone(
    kept: Checkpoint, engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.builder, "replay", object())
    for call in (lambda: engine.resume(kept), lambda: engine.interrupt("0")):
        with pytest.raises(RequestError, match=r"depend on a replayed trace$"):
            call()
    with LLM(
        small_config(),
        load_format="dummy",
        engine=dataclasses.replace(TIGHT, moe=MoeConfig(execution="capacity")),
    ) as llm:
        for call in (lambda: llm.resume(kept), lambda: llm.interrupt("0")):
            with pytest.raises(
                RequestError,
                match=r"depend on what else is in its steps \(limited capacity, routing by batch\)",
            ):
                call()


@pytest.mark.slow
def test_on_a_mesh_and_in_another_process() -> None:
    """The digest is of what the model is, not of how it is laid out or who computes it."""
    dummy: Any = {"load_format": "dummy", "engine": TIGHT}
    params = dataclasses.replace(SAMPLED, n=3, repetition_penalty=1.2)
    with LLM(main_config(), **dummy) as one:
        want = one.generate([PROMPTS[1]], params)[0]
        out = one.submit(PROMPTS[1], params)
        for _ in range(5):
            one.step()
        kept = one.interrupt(out.request_id)
        again = (
            "from moejax import LLM; from tests.engine.paged import TIGHT; from tests.engine.tiny import *;"
        )
        again += "print(LLM(main_config(), load_format='dummy', engine=TIGHT, fill=False).builder.model)"
        environment = {**os.environ, "PYTHONHASHSEED": "7"}
        told = subprocess.run(
            [sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == kept.model == one.builder.model
    for parallel in (ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(dp=2, ep=2)):
        with LLM(main_config(), parallel=parallel, **dummy) as many:
            resumed = many.resume(kept)
            while many.step():
                pass
            assert [s.token_ids for s in resumed.outputs] == [s.token_ids for s in want.outputs]
    for config, more in (
        (small_config(), {}), (main_config(), {"dtype": "bfloat16"}), (main_config(), {"seed": 1}),
    ):  # fmt: skip
        assert LLM(config, **dummy, **more, fill=False).builder.model != kept.model
