"""`SamplingParams.structured_outputs` and `allowed_token_ids`: what comes out is what was asked for."""

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import moejax
from moejax import LLM, EngineConfig, ParallelConfig, PrefixCacheConfig, SamplingParams
from moejax.core.errors import RequestError
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.grammar import Constraints
from moejax.engine.requests.api import Checkpoint
from moejax.engine.requests.tokenizer import Tokenizer
from tests.engine.tiny import small_config

TINY = Path(moejax.__file__).parent / "assets" / "tiny"
ENGINE = EngineConfig(
    compile_cache=False, max_model_len=256, max_num_seqs=8, seq_buckets=[8], token_buckets=[64],
    block_buckets=[64], num_blocks=64,
)  # fmt: skip
PROMPTS = ["The function returns", "def f(x):", "Once upon a time", "import"]


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of values that end soon."""
    simple = ["integer", "boolean", "enum", "string", "const"]
    kind = chance.choice(simple + ["object", "array", "any"] * depth)
    if kind == "object":
        names = chance.sample(["name", "age", "x", "values", "is_new", "kind"], chance.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(chance, depth - 1) for name in names},
            "required": names[: chance.randint(1, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        least = chance.randint(0, 2)
        items = random_schema(chance, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randint(0, 2)}
    leaves: dict[str, dict[str, Any]] = {
        "integer": {"type": "integer", "minimum": chance.randint(-9, 0), "maximum": chance.randint(1, 2000)},
        "boolean": {"type": "boolean"},
        "enum": {"enum": chance.sample(["red", "blue", 7, None, "a b", "ä"], chance.randint(1, 4))},
        "string": {"type": "string", "maxLength": chance.randint(1, 8)},
        "const": {"const": chance.choice(["on", 3, True])},
        "any": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{2,4}$"}]},
    }
    return leaves[kind]


def asks(count: int, **options: Any) -> tuple[list[str], list[SamplingParams], list[dict[str, Any]]]:
    """Requests for values of random schemas, hot and greedy."""
    chance = random.Random(3)
    schemas = [random_schema(chance) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=150,
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            structured_outputs={"json": schema},
            **options,
        )
        for i, schema in enumerate(schemas)
    ]
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)], params, schemas


def check(llm: LLM, count: int, **options: Any) -> list[list[list[int]]]:
    """Every output that ends is a value of its schema, and nearly all end."""
    prompts, params, schemas = asks(count, **options)
    outputs = llm.generate(prompts, params)
    ended = 0
    for output, schema in zip(outputs, schemas, strict=True):
        for sample in output.outputs:
            if sample.finish_reason == "stop":
                jsonschema.validate(json.loads(sample.text), schema)
                ended += 1
    assert ended > 0.9 * sum(len(output.outputs) for output in outputs)
    llm.engine.scheduler.check_integrity()
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("tiny", engine=ENGINE) as llm:
        yield llm


def test_outputs_are_values_of_their_schemas(tiny: LLM) -> None:
    tokens = check(tiny, 10)
    prompts, params, _ = asks(10)
    for i in range(3):
        assert [list(tiny.generate(prompts[i], params[i])[0].outputs[0].token_ids)] == tokens[i]


DRAFTS = {
    "forced": SpeculationConfig(method="forced", k=4),
    "ngram": SpeculationConfig(method="ngram", k=3, min_ngram=1),
    "self_layers": SpeculationConfig(method="self_layers", k=2, layers=1),
}


@pytest.mark.slow
def test_however_steps_are_made_outputs_are_the_same() -> None:
    """100 schemas, 8 at a time, two samples each: overlapped or not, with drafts, preempted, in chunks."""
    variants: dict[str, dict[str, Any]] = {
        "overlapped": {},
        "plain": {"overlap": False},
        "preempted": {"num_blocks": 40, "block_size": 4, "max_model_len": 160, "preemption": "swap"},
        "chunks": {"max_num_batched_tokens": 9, "prefix_cache": PrefixCacheConfig(enabled=True)},
        **{name: {"speculation": config} for name, config in DRAFTS.items()},
        "verified": {"deterministic": "verified", "verified_share": 0.5, "verify_every": 5},
    }
    first: Any = None
    for name, options in variants.items():
        with LLM("tiny", engine=dataclasses.replace(ENGINE, **options)) as llm:
            tokens = check(llm, 100, n=2)
            stats = llm.stats()
        first = first or tokens
        assert tokens == first, name
        assert bool(stats["preemptions"]) == (name == "preempted")
        assert bool(stats["drafted"]) == (name in ("forced", "ngram", "verified"))
        # A text may be written in other tokens than the tokenizer's, of which the model may prefer some.
        assert name != "forced" or stats["accepted"] > 0.5 * stats["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_layers", "ngram"])
def test_by_rejection_all_the_same(method: str) -> None:
    config = dataclasses.replace(DRAFTS[method], acceptance="rejection")
    with LLM("tiny", engine=dataclasses.replace(ENGINE, speculation=config)) as llm:
        check(llm, 20)


@pytest.mark.multidevice
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2, "attention": "data"}], ids=str)
def test_on_meshes(layout: dict[str, Any]) -> None:
    with LLM("tiny", engine=ENGINE, parallel=ParallelConfig(**layout)) as llm:
        check(llm, 12)


@pytest.mark.optimized
@pytest.mark.slow
def test_neighbours_keep_their_bits() -> None:
    """Beside rows that are masked, and in the program that masks."""
    prompts, masked, _ = asks(4)
    free = [
        SamplingParams(max_tokens=30, temperature=(0.0, 0.9)[i % 2], seed=i, logprobs=2) for i in range(4)
    ]

    def run(llm: LLM, params: list[SamplingParams]) -> list[Any]:
        outputs = llm.generate(prompts + PROMPTS, params)[4:]
        return [
            (sample.token_ids, [(np.float32(x.logprob).tobytes(), x.rank) for x in sample.logprobs or []])
            for sample in (output.outputs[0] for output in outputs)
        ]

    with LLM("tiny", engine=dataclasses.replace(ENGINE, overlap=False)) as llm:
        # The others as long as they are masked, so that batches are of the same rows.
        given = llm.generate(prompts, masked)
        same = [
            SamplingParams(max_tokens=len(x.outputs[0].token_ids), ignore_eos=True, temperature=0.0)
            for x in given
        ]
        assert run(llm, [*masked, *free]) == run(llm, [*same, *free])


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"regex": "[0-9]{3}-[a-c]+z"}, lambda text: re.fullmatch("[0-9]{3}-[a-c]+z", text)),
        ({"choice": ["yes", "no", 'a "b"\n']}, lambda text: text in ("yes", "no", 'a "b"\n')),
        ({"grammar": 'start: w (" " w)*\nw: /[a-z]{2}/'}, lambda t: all(len(w) == 2 for w in t.split())),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, lambda text: re.fullmatch("x[0-9]y", text)),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"json": '{"type": "integer"}'}, lambda text: isinstance(json.loads(text), int)),
    ],
    ids=["regex", "choice", "lark", "gbnf", "json_object", "json"],
)  # fmt: skip
def test_every_kind_leads_to_texts_that_hold(asked: dict[str, Any], holds: Any) -> None:
    """Random tokens of each mask, until only the end is left."""
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    constraints, chance, ended = Constraints(tokenizer, 2048, (0,)), random.Random(1), 0
    (constraint,) = constraints.make(asked, None, 1)
    assert constraint is not None
    for _ in range(12):
        output: list[int] = []
        while len(output) < 300:
            bits = np.unpackbits(constraint.words(output).view(np.uint8), bitorder="little")
            output.append(chance.choice(np.flatnonzero(bits).tolist()))
            if output[-1] == 0:
                ended += 1
                assert holds(tokenizer.decode(output)), tokenizer.decode(output)
                break
    assert ended


def test_states_go_back_where_drafts_were_wrong() -> None:
    constraints = Constraints(Tokenizer.load(TINY), 2048, (0,))
    asked = {"regex": "[a-c]{4}"}
    constraint, fresh = constraints.make(asked, None, 2)
    assert constraint is not None and fresh is not None
    assert constraints.tokenizer is not None
    a, b, c = (constraints.tokenizer.encode(x, add_special_tokens=False)[0] for x in "abc")
    for output in (
        [a, b, c],
        [a, b, c, a],
        [a, b, c, a, 0],
        [a, b],
        [],
        [c, c, c],
        [a, 5],
        [a],
        [a, b, c, b],
    ):
        twin = constraints.make(asked, None, 1)[0]
        assert twin is not None
        assert (constraint.words(output) == twin.words(output)).all(), output
    assert (fresh.words([]) == constraint.words([])).all()
    assert constraint.forced([a, b, c], 3) == [] and not (constraint.words([a, 5]) + 1).any()
    const = constraints.make({"json": {"const": "a long text"}}, None, 1)[0]
    assert const is not None and len(const.forced([], 9)) > 2 and len(const.forced([], 2)) == 2


def test_only_allowed_tokens(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=[5, 70, 2047], seed=1, temperature=50.0)
    tokens = tiny.generate("x", params)[0].outputs[0].token_ids
    assert set(tokens) <= {5, 70, 2047} and len(set(tokens)) > 1
    with pytest.raises(RequestError, match="allowed_token_ids has 2048, out of range"):
        tiny.generate("x", dataclasses.replace(params, allowed_token_ids=[2048]))
    both = {"allowed_token_ids": list(range(300)), "structured_outputs": {"regex": "[0-9]{9}"}}
    sample = tiny.generate("x", dataclasses.replace(params, **both))[0].outputs[0]
    assert re.fullmatch("[0-9]+", sample.text) and max(sample.token_ids) < 300


def test_an_interrupted_request_goes_on_within_its_grammar(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=4, structured_outputs={"regex": "[0-9]{12}"})
    whole = tiny.generate("x", params)[0].outputs[0].token_ids
    output = tiny.submit("x", params)
    for _ in range(7):
        tiny.step()
    kept = Checkpoint.from_json(tiny.interrupt(output.request_id).to_json())
    assert 0 < len(kept.samples[0]) < len(whole)
    output = tiny.resume(kept)
    while not output.finished:
        tiny.step()
    assert output.outputs[0].token_ids == whole


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"jsn": 1}}, "unknown key 'jsn'; did you mean 'json'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "takes one key, got json, regex"),
        ({"structured_outputs": {"choice": []}}, "choice must be a list of texts"),
        ({"structured_outputs": {"json_object": False}}, "json_object must be true"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "does not go with ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "does not go with min_tokens"),
        ({"structured_outputs": {"json": {"type": "objec"}}}, "structured_outputs.json: Invalid type: objec"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: "),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex: .*unclosed character class"),
        ({"structured_outputs": {"grammar": "start: x"}}, "unknown name"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ],
)
def test_mistakes(fields: dict[str, Any], words: str) -> None:
    constraints = Constraints(Tokenizer.load(TINY), 2048, (0,))
    with pytest.raises(RequestError, match=words) as told:
        params = SamplingParams(**fields)
        constraints.make(params.structured_outputs, params.allowed_token_ids, 1)
    assert "\n" not in str(told.value)


def test_what_an_engine_cannot_do() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    plain = LLM(small_config(), load_format="dummy", engine=EngineConfig(compile_cache=False))
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        plain.generate([[1, 2]], params)
    static = LLM("tiny", engine=dataclasses.replace(ENGINE, batching="static"))
    with pytest.raises(RequestError, match=r"does not go with engine\.batching=static"):
        static.generate("x", params)
