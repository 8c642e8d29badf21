"""Drafts by the layer that a checkpoint has after its last one: they are what that layer computes over whole
sequences, wherever these have been, and change no token."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from moejax import LLM, AdaptersConfig, EngineConfig, ParallelConfig, SamplingParams, SpeculationConfig
from moejax.checkpoint.directory import SINGLE
from moejax.checkpoint.maps import TABLES
from moejax.checkpoint.maps.mtp import mtp_rules
from moejax.checkpoint.maps.rules import apply_transform
from moejax.checkpoint.plan import canonical_key
from moejax.core.config import ModelConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.engine.scheduling.speculation import Speculation
from moejax.models.mtp import MtpDecoder, mtp_config
from moejax.nn.param import initialize, iter_params
from tests.engine.paged import SCARCE, TIGHT, assert_clean, greedy, prompt, tight
from tests.engine.test_speculative_engine import PREFIXED, STORED, check_equal, one_kind
from tests.engine.tiny import main_config, small_config, write_model
from tests.model_shapes import GLM, LATENT

MODELS: dict[str, ModelConfig] = {
    "glm4_moe": small_config(**GLM, mtp_layers=1),
    "deepseek_v3": main_config(**LATENT, moe_layers=(False, True), mtp_layers=1),
}
PROMPTS = [prompt(n) for n in (11, 3, 14, 1, 9)]
PARAMS = [
    greedy(14),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True),
    greedy(16, logit_bias={5: 2.0, 7: -3.0}),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=4, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, seed=11, top_k=20, ignore_eos=True),
]


def with_mtp(directory: Path, config: ModelConfig) -> Path:
    """Writes a random model and its layer in DeepSeek-V3's layout, with what that stores twice."""
    write_model(directory, config, tokenizer=False)
    layer, rules = MtpDecoder(mtp_config(config)), mtp_rules(TABLES[config.family], config.num_layers)
    initialize(layer, 5)
    whole = load_file(directory / SINGLE)
    for name, param in iter_params(layer):
        key, _, transform = canonical_key(name, rules)
        value = np.asarray(param.get_metadata("spec").canonical(param[...]))
        parts = enumerate(value) if "{e}" in key else [(0, value)]
        for expert, part in parts:
            whole[key.replace("{e}", str(expert))] = np.ascontiguousarray(apply_transform(transform, part))
    prefix = f"model.layers.{config.num_layers}"
    whole[f"{prefix}.embed_tokens.weight"] = whole["model.embed_tokens.weight"]
    whole[f"{prefix}.shared_head.head.weight"] = whole["lm_head.weight"]
    save_file(whole, directory / SINGLE)
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where one of the models is."""
    return functools.cache(lambda name: with_mtp(tmp_path_factory.mktemp(name), MODELS[name]))


def drafting(engine: EngineConfig, **fields: Any) -> EngineConfig:
    return dataclasses.replace(engine, speculation=SpeculationConfig(method="mtp", **{"k": 3} | fields))


class Reference:
    """The layer over whole sequences, without a cache: what it drafts after some tokens."""

    def __init__(self, llm: LLM, length: int = 40) -> None:
        functions = llm.runner.drafter.functions
        model, layer = llm.model, functions.merge(functions.leaves)
        self.length = length
        graph, state = nnx.split((model, layer))

        def run(state: Any, ids: jax.Array, known: jax.Array, drafts: jax.Array) -> Any:
            model, layer = nnx.merge(graph, state)
            positions = jnp.arange(length, dtype=jnp.int32)[None]
            hidden, *_ = model.run(model.embed(ids), positions)
            token = model.logits(hidden[0, known - 1]).argmax()
            after = jnp.roll(ids, -1, axis=1)
            for i in range(3):  # what stands in the place of each further draft is the layer's own
                out, *_ = layer.run(layer.join(after, hidden), positions)
                place = known - 2 + i
                drafts = drafts.at[i].set(layer.logits(out[0, place]).argmax().astype(jnp.int32))
                hidden = hidden.at[0, place + 1].set(out[0, place])
                after = after.at[0, place + 1].set(drafts[i])
            return token, drafts

        self._run = jax.jit(lambda *given: run(state, *given))

    def next(self, ids: list[int]) -> tuple[int, list[int]]:
        """The likeliest token, and what is drafted after the one before it, the likeliest ones."""
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(ids)] = ids
        token, drafts = self._run(padded, np.int32(len(ids)), np.zeros(3, np.int32))
        return int(token), np.asarray(drafts).tolist()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What greedy sequences had, and what was drafted for them then."""
    made: list[tuple[list[int], list[int]]] = []
    accept = Speculation.accept

    def noted(self: Speculation, plan: Any, row: int) -> bool:
        draft, sequence = plan.drafts[row], plan.decodes[row]
        if len(draft.tokens) == 1 and sequence.params.greedy and not sequence.params.logit_bias:
            drafts = [draft.token for r, draft in plan.drafts.items() if plan.decodes[r] is sequence]
            made.append((list(sequence.tokens[:-1]), drafts))
        return accept(self, plan, row)

    monkeypatch.setattr(Speculation, "accept", noted)
    return made


CASES: dict[str, EngineConfig] = {
    "chunked": TIGHT,
    "plain_loop": tight(overlap=False),
    "preempting": SCARCE,
    "swapping": dataclasses.replace(SCARCE, preemption="swap"),
    "prefixes": PREFIXED,
    "prefixes_on_host": STORED,
}


def test_drafts_are_the_layer_s_own_and_tokens_the_model_s(folder: Any, made: Any) -> None:
    """In chunks, beside others, computed again after a preemption."""
    llm = LLM(folder("glm4_moe"), engine=drafting(dataclasses.replace(SCARCE, num_blocks=10, max_num_seqs=2)))
    llm.runner.builder.warm_owners = llm.runner.drafter.builder.warm_owners = [4]
    outs, reference = llm.generate(PROMPTS[:3], greedy(15)), Reference(llm)
    for out in outs:
        ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        for end in range(len(out.prompt_token_ids), len(ids)):
            assert reference.next(ids[:end])[0] == ids[end]
    assert llm.stats()["drafted"] > 20 and llm.stats()["preemptions"] > 0
    for known, drafts in made:
        assert drafts == reference.next(known)[1][: len(drafts)]
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_without_drafts(model: str, name: str, k: int, folder: Any, made: Any) -> None:
    plain = LLM(folder(model), engine=CASES[name])
    want = one_kind(plain, PARAMS).generate(PROMPTS, PARAMS)
    llm = one_kind(plain.variant(drafting(CASES[name], k=k)), PARAMS)
    check_equal(llm.generate(PROMPTS, PARAMS), want)
    stats, reference = llm.stats(), Reference(llm)
    assert stats["drafted"] > 20 and made
    assert (stats["preemptions"] > 0) == (CASES[name].num_blocks == SCARCE.num_blocks)
    if "prefixes" not in name:  # where a shared block's last position may be another sequence's
        for known, drafts in made:
            assert drafts == reference.next(known)[1][: len(drafts)]
    assert_clean(llm)


def test_the_layer_is_read_when_it_drafts_and_only_then(
    folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plain = LLM(folder("glm4_moe"), engine=TIGHT)
        assert "passed over model.layers.1, which predict further tokens" in caplog.text
        caplog.clear()
        llm = plain.variant(drafting(TIGHT))
    layer = llm.runner.drafter.functions.leaves
    shared = [leaf for leaf in layer if any(leaf is mine for mine in plain.runner.functions.leaves)]
    assert len(shared) == 2  # embedding and output projection
    size = sum(leaf.nbytes for leaf in layer) - sum(leaf.nbytes for leaf in shared)
    assert f"read {size / 1e6:.1f} MB of" in caplog.text and "passed over" not in caplog.text
    held = llm.memory.beside - plain.memory.beside
    assert held == size + sum(x.nbytes for x in jax.tree.leaves(llm.runner.drafter.pool.take(1)))


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_warm_up_compiles_all_and_new_weights_are_shared(acceptance: Any, folder: Any) -> None:
    engine = tight(max_num_batched_tokens=16, strict_compile=True, seq_buckets=None, token_buckets=None)
    plain = LLM(folder("glm4_moe"), engine=engine)
    params = [greedy(12), greedy(9, n=2), greedy(12, min_tokens=4, ignore_eos=False)]
    llm = plain.variant(drafting(engine, acceptance=acceptance))
    llm.warmup(max_total_len=32, sampling_params=params)
    check_equal(llm.generate(PROMPTS[:3], params), plain.generate(PROMPTS[:3], params))
    assert llm.stats()["drafted"] > 0
    other = {
        name: -param.get_metadata("spec").canonical(param[...]) for name, param in iter_params(plain.model)
    }
    llm.update_weights(other)
    check_equal(llm.generate(PROMPTS[:3], params), plain.generate(PROMPTS[:3], params))
    mine = llm.runner.drafter.functions.leaves
    assert sum(any(leaf is x for x in plain.runner.functions.leaves) for leaf in mine) == 2


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    config = MODELS["glm4_moe"]
    write_model(tmp_path, config, tokenizer=False)
    with pytest.raises(CheckpointError, match=r"there is no tensor model\.layers\.1\.\*, although") as e:
        LLM(tmp_path, engine=drafting(TIGHT))
    assert "\n" not in str(e.value)
    refused: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
        "a checkpoint without MTP layers": (config.replace(mtp_layers=0), {}),
        "the MTP layers of qwen3_moe; known are those of deepseek_v3, glm4_moe": (
            small_config(mtp_layers=1),
            {},
        ),
        "several devices": (config, {"parallel": ParallelConfig(tp=2)}),
        "engine.adapters.slots": (config, {"engine": drafting(tight(adapters=AdaptersConfig(slots=1)))}),
    }
    for says, (model, options) in refused.items():
        with pytest.raises(ConfigError, match=says) as caught:
            LLM(model, load_format="dummy", **{"engine": drafting(TIGHT)} | options)
        assert "\n" not in str(caught.value)
